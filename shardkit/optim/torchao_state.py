"""State of torchao's 8-bit AdamW as state of `AdamW8bit`, without importing torchao.

torchao cuts blocks of 256 from the flattened tensor; where rows are whole numbers of blocks these are the
same blocks, the same table and the same scales, and every code is kept. Elsewhere moments are read and stored
anew, rounded once more. What one of the two keeps in float32 is converted, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardkit.optim.adamw8bit import MOMENTS, Held, held_of
from shardkit.optim.blockwise import BlockFormat, Quantized
from shardkit.optim.optimizers import AdamW8bit
from shardkit.optim.placed import placed

State = dict[str, Tensor]


def convert_torchao_state(state_dict: Mapping[str, Any], optimizer: AdamW8bit) -> dict[str, Any]:
    """The state dict of `optimizer` with the state of torchao's AdamW8bit. Nothing is communicated.

    Args:
        state_dict: `torchao.optim.AdamW8bit(...).state_dict()` of one process, over the same parameters in
            the same order and groups.
        optimizer: over plain parameters, with `bits=8` and the dynamic format. Load the result with its
            `load_state_dict`; a checkpoint of it then goes to any sharding.

    Returns:
        A state dict for `optimizer.load_state_dict`, with torchao's lr, betas, eps and weight_decay.

    Raises:
        ValueError: the parameters are others, or the format is not torchao's.
    """
    own = optimizer.state_dict()
    groups = list(zip(own["param_groups"], state_dict["param_groups"], strict=True))
    for mine, theirs in groups:
        if (mine["bits"], mine["format"], mine["tile"]) != (8, "dynamic", None):
            raise ValueError(
                "convert_torchao_state: expected an optimizer with bits=8, format='dynamic', no tile."
            )
        if len(mine["params"]) != len(theirs["params"]):
            raise ValueError(
                f"convert_torchao_state: expected groups of equal size, got {len(mine['params'])} parameters "
                f"and {len(theirs['params'])}. Make both optimizers of the same groups."
            )
        mine |= {key: theirs[key] for key in ("lr", "betas", "eps", "weight_decay")}
    pairs = [pair for mine, theirs in groups for pair in zip(mine["params"], theirs["params"], strict=True)]
    params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    for (mine_id, their_id), (param, group) in zip(pairs, params, strict=True):
        if their_id in state_dict["state"]:
            held = held_of(placed(str(mine_id), param), group)
            own["state"][mine_id] = _converted(state_dict["state"][their_id], own["state"][mine_id], held)
    return own


def _converted(theirs: Mapping[str, Any], mine: State, held: Held) -> State:
    """One parameter's state."""
    state = {"step": torch.as_tensor(theirs["step"], dtype=torch.float32).clone()}
    for index, moment in enumerate(MOMENTS):
        value = theirs[moment]
        codes = mine[moment if held.formats is None else f"{moment}_codes"]
        if value.shape != codes.shape:
            raise ValueError(
                f"param {held.at.name!r}: its shape is {tuple(codes.shape)}, torchao's {tuple(value.shape)}. "
                "Make both optimizers of the same parameters."
            )
        if held.formats is None:
            state[moment] = _float(value, signed=index == 0)
            continue
        form = held.formats[index]
        same_blocks = hasattr(value, "codes") and value.block_size == form.block and not form.square_root
        if same_blocks and held.rows.num_cols == form.block:
            stored = Quantized(value.codes, value.scale)
        else:
            stored = form.quantize(_float(value, signed=index == 0).reshape(-1, held.rows.num_cols))
        for name, part in zip(("codes", "scales"), stored, strict=True):
            state[f"{moment}_{name}"] = part.detach().clone().view(mine[f"{moment}_{name}"].shape)
    return state


def _float(value: Any, *, signed: bool) -> Tensor:
    """A moment of torchao's as float32: its blocks are rows of a matrix of `block_size` columns."""
    if not hasattr(value, "codes"):
        return value.detach().float().clone()  # type: ignore[no-any-return]
    form = BlockFormat(value.block_size, signed=signed)
    blocks = Quantized(value.codes.reshape(-1, value.block_size), value.scale.view(-1, 1))
    return form.dequantize(blocks, value.block_size).view(value.shape)
