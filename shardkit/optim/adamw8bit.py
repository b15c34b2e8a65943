"""AdamW whose moments are codes of 8 or 4 bits, on shards of whole rows; nothing travels.

AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2) with the moments of
Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, section 2. The codes of a row depend on
that row alone, so any number of ranks that hold whole rows gives, to the bit, what one process gives. The
update uses the moments of the current step before they are stored.

    stored  --dequantize-->  m, v float32  --lerp with the gradient-->  m, v  --step-->  parameter
                                                                          |--quantize--> stored

State has the layout of its parameter (`rows.py`); which rows are stepped together is `batches.py`'s part and
changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardkit.optim.algorithm import Group, Target
from shardkit.optim.batches import RowRange, batches_of_rows
from shardkit.optim.blockwise import BlockFormat, Quantized
from shardkit.optim.pieces import Piece
from shardkit.optim.placed import Placed
from shardkit.optim.rounding import round_stochastically
from shardkit.optim.rows import (
    Rows,
    elements_of,
    num_cols,
    require_whole_blocks,
    rows_of,
    zeros_in_rows,
)

DEFAULTS: Mapping[str, object] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "maximize": False,
    "block": 256,
    "bits": 8,
    "format": "dynamic",
    "second_moment": None,
    "tile": None,
    "stochastic_rounding": False,
    "seed": 0,
    "min_numel": 4096,
}
FORMAT_SETTINGS = ("block", "bits", "format", "second_moment", "tile", "min_numel")
CACHE_NUMEL = 1 << 16  # elements of a batch on the CPU: its temporaries stay in the cache
DEVICE_NUMEL = 1 << 26  # and elsewhere, where launches count
MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[str, Tensor]
Formats = tuple[BlockFormat, BlockFormat]  # of both moments


class Held(NamedTuple):
    """A parameter as it is stepped."""

    at: Placed
    rows: Rows
    formats: Formats | None  # None keeps the moments in float32

    @property
    def tiled(self) -> bool:
        return self.rows.scale_of_row is not None


class AdamW8bitAlgorithm:
    """AdamW8bit's answers to the optimizer; elementwise."""

    def __init__(self) -> None:
        self.defaults = DEFAULTS
        self.state_settings: Sequence[str] = FORMAT_SETTINGS
        self.plan_settings: Sequence[str] = ()
        self.adds_grads_to: str | None = None
        self._held: dict[str, Held] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_held": {}}  # what is read from layouts is neither copied nor pickled

    def check_group(self, group: Group) -> None:
        """Raise ValueError for a setting out of range."""
        tile, betas = group["tile"], group["betas"]
        expected = {
            "betas": (all(0 <= beta < 1 for beta in betas), "in [0, 1)"),
            "block": (group["block"] >= 2 and group["block"] % 2 == 0, "even and at least 2"),
            "bits": (
                group["bits"] == 8 or (group["bits"] == 4 and group["format"] == "dynamic"),
                "8, or 4 with dynamic",
            ),
            "format": (group["format"] in ("dynamic", "e4m3"), "'dynamic' or 'e4m3'"),
            "second_moment": (group["second_moment"] in (None, "v", "sqrt"), "'v', 'sqrt' or None"),
            "tile": (
                tile is None or (min(tile) >= 2 and tile[1] % 2 == 0),
                "at least 2 rows and 2, 4, .. columns",
            ),
        }
        for name, (good, wish) in expected.items():
            if not good:
                raise ValueError(f"AdamW8bit: {name}={group[name]!r}: expected {wish}.")

    def init_state(self, at: Placed, param: Tensor, group: Group, pieces: Sequence[Piece]) -> State:
        """Zeros laid out as the parameter: `step`, and codes and scales, or the moments in float32.

        Raises:
            ValueError: a shard cuts a block of the parameter.
            NotImplementedError: two mesh axes cut its columns, or the rows of its tiles.
        """
        state, formats = {"step": torch.tensor(0.0)}, _formats(at, group)
        if formats is None:
            return state | {name: torch.zeros_like(param, dtype=torch.float32) for name in MOMENTS}
        cols, (tile_rows, block) = num_cols(at.layout.shape), _tile(group)
        require_whole_blocks(at, block=block, tile_rows=tile_rows)
        for name, form in zip(MOMENTS, formats, strict=True):
            if form.bits == 8:
                state[f"{name}_codes"] = torch.zeros_like(param, dtype=torch.uint8)
            else:
                num_bytes = form.num_code_bytes(cols)
                state[f"{name}_codes"] = zeros_in_rows(at, num_bytes, tile_rows=1, dtype=torch.uint8)
            state[f"{name}_scales"] = zeros_in_rows(
                at, form.num_scales(cols), tile_rows=tile_rows, dtype=torch.float32
            )
        return state

    def begin(self, targets: Sequence[Target]) -> None:
        """The whole step, on parameters that one batch can hold together: of one row, format and step."""
        torch._foreach_add_([target.state["step"] for target in targets], 1.0)
        alike: dict[object, list[tuple[Target, Held]]] = {}
        for target in targets:
            held, param, step = self._held_of(target), target.param, target.state["step"].item()
            alone = target.name if held.tiled else None
            key = (id(target.group), held.rows.num_cols, held.formats, param.dtype, param.device, step, alone)
            alike.setdefault(key, []).append((target, held))
        for pairs in alike.values():
            _step_alike(*zip(*pairs, strict=True))

    def _held_of(self, target: Target) -> Held:
        """Read from the layout once, and again where the parameter is another or has moved."""
        held = self._held.get(target.name)
        rounds = target.group["stochastic_rounding"]
        if held is None or held.at is not target.at or rounds != (held.rows.first_place is not None):
            held = self._held[target.name] = held_of(target.at, target.group)
        return held


def held_of(at: Placed, group: Group) -> Held:
    """How a parameter is read: by rows, by blocks of rows, or element by element where it is small."""
    formats, (tile_rows, block) = _formats(at, group), _tile(group)
    if formats is None:
        rows = elements_of(at)
    else:
        rows = rows_of(at, tile_rows)
        rows = rows.split(block) if tile_rows == 1 else rows
    return Held(at, rows if group["stochastic_rounding"] else rows._replace(first_place=None), formats)


def _formats(at: Placed, group: Group) -> Formats | None:
    """How the moments are stored; the global size decides."""
    shape = at.layout.shape
    if len(shape) < 2 or math.prod(shape) < group["min_numel"]:
        return None
    _, block = _tile(group)
    root = group["second_moment"] == "sqrt" or (group["second_moment"] is None and group["tile"] is not None)
    return (
        BlockFormat(block, group["bits"], group["format"]),
        BlockFormat(block, group["bits"], group["format"], signed=False, square_root=root),
    )


def _tile(group: Group) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    return group["tile"] or (1, group["block"])


def _step_alike(targets: Sequence[Target], held: Sequence[Held]) -> None:
    """Step parameters that can share batches."""
    group, step = targets[0].group, int(targets[0].state["step"].item())
    matrices = list(map(_matrices, targets, held))
    num_rows = tuple(h.rows.num_rows for h in held)
    numel = CACHE_NUMEL if targets[0].param.device.type == "cpu" else DEVICE_NUMEL
    max_rows = max(1, num_rows[0] if held[0].tiled else numel // max(1, held[0].rows.num_cols))
    for ranges in batches_of_rows(num_rows, max_rows):
        _step_batch(group, held, matrices, ranges, step)


def _step_batch(
    group: Group, held: Sequence[Held], matrices: Sequence[State], ranges: Sequence[RowRange], step: int
) -> None:
    """Step some rows: dequantize, update, quantize."""

    def views(name: str) -> list[Tensor]:
        return [matrices[own.matrix][name][own.start : own.stop] for own in ranges]

    rows, formats = held[ranges[0].matrix].rows, held[ranges[0].matrix].formats
    param_views = views("param")
    param, grad = _joined(param_views), _joined(views("grad")).float()
    if formats is None:
        stored = [[views(moment)] for moment in MOMENTS]
        exp_avg, exp_avg_sq = (_joined(parts) for (parts,) in stored)
    else:
        stored = [[views(f"{moment}_codes"), views(f"{moment}_scales")] for moment in MOMENTS]
        exp_avg, exp_avg_sq = (
            form.dequantize(Quantized(*map(_joined, parts)), rows.num_cols, rows.scale_of_row)
            for form, parts in zip(formats, stored, strict=True)
        )
    exact = param.float()  # (rows, cols) float32, the parameter itself if it is that
    adamw_(exact, grad, exp_avg, exp_avg_sq, group=group, step=step)
    if group["stochastic_rounding"] and param.dtype == torch.bfloat16:
        firsts = _joined(views("first_place"))  # (rows, 1)
        place = firsts + torch.arange(rows.num_cols, device=firsts.device)  # (rows, cols)
        exact = round_stochastically(exact, place, group["seed"], step)
    _write(param_views, exact)
    for index, moment in enumerate((exp_avg, exp_avg_sq)):
        parts = (moment,) if formats is None else formats[index].quantize(moment, rows.scale_of_row)
        for targets, part in zip(stored[index], parts, strict=True):
            _write(targets, part)


def adamw_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, group: Group, step: int
) -> None:
    """One step of AdamW in place, on float32 tensors of one shape (algorithm 2, lines 6 to 12).

    Args:
        param: stepped in place.
        grad: of the loss.
        exp_avg: first moment, updated in place.
        exp_avg_sq: second moment, updated in place.
        group: lr, betas, eps, weight_decay.
        step: number of this step, from one.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    if group["weight_decay"]:
        param.mul_(1 - lr * group["weight_decay"])
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    param.sub_(torch.div(exp_avg, denominator, out=denominator).mul_(lr / (1 - beta1**step)))


def _matrices(target: Target, held: Held) -> State:
    """Views (rows, cols) of a parameter, its gradient and its moments."""
    found = {"param": target.param, "grad": target.grad, **target.state}
    del found["step"]
    if held.rows.first_place is not None:
        found["first_place"] = held.rows.first_place
    num_rows = held.rows.num_rows
    matrices = {}
    for name, part in found.items():
        if held.tiled and name.endswith("_scales"):
            matrices[name] = part.flatten(0, -2)  # a row a tile
        else:
            matrices[name] = part.reshape(num_rows, -1) if num_rows else part
    return matrices


def _joined(views: Sequence[Tensor]) -> Tensor:
    return views[0] if len(views) == 1 else torch.cat(list(views))


def _write(views: Sequence[Tensor], rows: Tensor) -> None:
    """Put joined rows back where they came from."""
    if len(views) > 1:
        torch._foreach_copy_(list(views), list(rows.split([len(view) for view in views])))
    elif views[0] is not rows:
        views[0].copy_(rows)
