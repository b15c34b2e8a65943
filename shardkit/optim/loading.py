"""What a state dict must be to be loaded, and how it is: into the state that is there.

Dtypes and layouts stay. torch's `load_state_dict` casts every state to the dtype of its parameter, which
ruins codes, scales and float32 statistics of a bfloat16 parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.optim.placed import drawn, local
from shardkit.ragged import redistribute

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


def check_state(name: str, loaded: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError where part of a parameter's own state is missing, or is another tensor."""
    for key, mine in own.items() if loaded else ():
        theirs = loaded.get(key)
        given = torch.empty(()) if isinstance(theirs, float | int) else theirs
        is_tensor = isinstance(given, Tensor) and given.shape == mine.shape
        if not is_tensor or isinstance(given, DTensor) != isinstance(mine, DTensor):
            got = drawn(given) if isinstance(given, Tensor) else "nothing"
            raise ValueError(
                f"param {name!r}: expected its {key} to be {drawn(mine)}, got {got}. Load through "
                "torch.distributed.checkpoint, or full tensors through "
                "shardkit.checkpoint.set_optimizer_state_dict."
            )


def copy_state(own: Mapping[str, Tensor], loaded: Mapping[str, Any]) -> None:
    """Copy a state that `check_state` accepts into a parameter's own; zeros where nothing was saved.

    Collective over the meshes of the state: all ranks must call.
    """
    for key, mine in own.items():
        theirs = torch.as_tensor(loaded[key]) if loaded else torch.zeros(())
        if isinstance(theirs, DTensor) and isinstance(mine, DTensor):  # one rank cannot say if all lie alike
            theirs = redistribute(theirs, mine.placements)
        local(mine).copy_(local(theirs))
