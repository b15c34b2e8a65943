"""What a state dict must be to be loaded: of the optimizer's algorithms and formats, laid out as its own.

Pure. torch's `load_state_dict` casts every state to the dtype of its parameter, which ruins codes, scales and
float32 statistics of a bfloat16 parameter; here each keeps the dtype that its algorithm gave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardkit.optim.placed import drawn, lie_alike

_FUNCTION = "a function"


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group as it is saved: torch gathers no state dict with a dtype or a function in it."""
    return {
        key: str(value) if isinstance(value, torch.dtype) else _FUNCTION if callable(value) else value
        for key, value in group.items()
    }


def read_settings(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group as it is used; functions, and settings that were not saved, are the optimizer's own."""
    read = dict(own)
    for key, value in saved.items():
        if isinstance(value, str) and value.startswith("torch."):
            read[key] = getattr(torch, value.removeprefix("torch."))
        elif not (isinstance(value, str) and value == _FUNCTION):
            read[key] = value
    return read


def check_saved_settings(
    index: int, own: Mapping[str, Any], saved: Mapping[str, Any], settings: Sequence[str]
) -> None:
    """Raise ValueError where a group was saved with another algorithm, or another format of state."""
    for setting in ("algorithm", *settings):
        mine, theirs = own[setting], saved.get(setting, own[setting])
        theirs = tuple(theirs) if isinstance(theirs, list) else theirs
        if theirs != mine:
            raise ValueError(
                f"group {index}: this optimizer has {setting}={mine!r}, and the state was saved with "
                f"{theirs!r}. Construct the optimizer with {setting}={theirs!r}."
            )


def exact_state(name: str, loaded: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loaded state of a parameter, as `own` in dtypes and devices; zeros where nothing is saved.

    Raises:
        ValueError: something is missing, or lies otherwise.
    """
    if not loaded:
        return {key: torch.zeros_like(value) for key, value in own.items()}
    state: dict[str, Tensor] = {}
    for key, mine in own.items():
        theirs = loaded.get(key)
        given = theirs if isinstance(theirs, Tensor) else torch.tensor(0.0 if theirs is None else theirs)
        if theirs is None or not lie_alike(given, mine):
            got = "nothing" if theirs is None else drawn(given)
            raise ValueError(
                f"param {name!r}: expected its {key} to be {drawn(mine)}, got {got}. Load through "
                "torch.distributed.checkpoint, or full tensors through "
                "shardkit.checkpoint.set_optimizer_state_dict."
            )
        state[key] = given.to(dtype=mine.dtype, device=mine.device)
    return state
