"""`AdamW8bit`: AdamW whose moments are codes of 8 or 4 bits, on shards of whole rows.

AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2) with the moments of
Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, section 2. Nothing is communicated: the
codes of a row depend on that row alone, so any number of ranks that hold whole rows gives, to the bit, what
one process gives. The update uses the moments of the current step before they are stored.

    stored  --dequantize-->  m, v float32  --lerp with the gradient-->  m, v  --step-->  parameter
                                                                          |--quantize--> stored

State is made by the constructor, in the layout of its parameter (`rows.py`); which rows are stepped together
is `batches.py`'s part and changes no number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from shardkit._torch import spec_of
from shardkit.optim.batches import Piece, batches_of_rows
from shardkit.optim.blockwise import BlockFormat, Format, Quantized
from shardkit.optim.codes import Bits
from shardkit.optim.placed import local
from shardkit.optim.rounding import round_stochastically
from shardkit.optim.rows import (
    Rows,
    elements_of,
    num_cols,
    require_whole_blocks,
    rows_of,
    zeros_in_rows,
)
from shardkit.ragged import RaggedTensor
from shardkit.specs import same_layout

CACHE_NUMEL = 1 << 16  # elements of a batch on the CPU: its temporaries stay in the cache
DEVICE_NUMEL = 1 << 26  # and elsewhere, where launches count
FORMAT_SETTINGS = ("block", "bits", "format", "second_moment", "tile", "min_numel")
MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[str, Tensor]
Group = dict[str, Any]


class Held(NamedTuple):
    """A parameter as it is stepped."""

    name: str
    rows: Rows
    formats: tuple[BlockFormat, BlockFormat] | None  # of both moments; None keeps them in float32

    @property
    def tiled(self) -> bool:
        return self.rows.scale_of_row is not None


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments of about 2 bytes a parameter, 1 with `bits=4`, exact under any sharding by rows.

    Parameters of fewer than two dims or of fewer than `min_numel` elements keep float32 moments; the global
    size decides, never a shard's. No call communicates. Constructed and stepped by every rank.

    State of a parameter, in its layout: `step`; `exp_avg_codes` and `exp_avg_sq_codes`, uint8 of its shape
    (with 4 bits two a byte along a row); `exp_avg_scales` and `exp_avg_sq_scales`, float32, `(rows,
    ceil(cols / block))`. It is saved and loaded by torch's distributed checkpoint, into any number of ranks.

    Args:
        params: parameters, named ones, or groups; any keyword below can be a group's own. Plain tensors,
            Shard and replicated DTensors, RaggedTensors.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times lr.
        maximize: ascend.
        block: columns of a row that share a scale.
        bits: of a code. 4 is for the dynamic format.
        format: "dynamic", or "e4m3" for float8.
        second_moment: "v" stores it, "sqrt" its root; by default the root with tiles.
        tile: (rows, columns) that share a scale, such as (128, 128), in place of one row of `block` columns.
            Ranks then hold whole tiles: `Blocks(128)`.
        stochastic_rounding: round bfloat16 parameters by chance instead of to the nearest.
        seed: of that chance, beside the step and the element's global index.
        min_numel: elements below which moments stay float32.

    Raises:
        ValueError: a setting is out of range, or a shard cuts a block of a parameter.
        TypeError: a parameter is not real.
        NotImplementedError: two mesh axes cut the columns of a parameter, or the rows of its tiles.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        block: int = 256,
        bits: Bits = 8,
        format: Format = "dynamic",
        second_moment: Literal["v", "sqrt"] | None = None,
        tile: tuple[int, int] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        min_numel: int = 4096,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name not in ("self", "params")}
        settings.pop("__class__", None)
        self._held: dict[Tensor, Held] = {}
        super().__init__(params, settings)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, as torch's, and make their state."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_settings(group)
            held = _held_of(group, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise
        self._held |= held
        for param in group["params"]:
            self.state[param] = _new_state(param, held[param], group)

    def held(self) -> list[Held]:
        """How each parameter is read and stored, in the order of the groups."""
        return list(self._held.values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        groups = enumerate(self.param_groups)
        self._held = {p: held for index, group in groups for p, held in _held_of(group, index).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, of an optimizer with the same format and the same layouts.

        torch's own would cast codes and scales to the dtype of the parameter.

        Raises:
            ValueError: the format, or the shape or layout of a state, is another than this optimizer's.
        """
        _check_saved_format(self.param_groups, state_dict["param_groups"])
        before = {param: self.state[param] for param in self._held}
        super().load_state_dict(dict(state_dict))
        saved_ids = [saved for group in state_dict["param_groups"] for saved in group["params"]]
        for saved, param in zip(saved_ids, list(self._held), strict=True):
            loaded = state_dict["state"].get(saved, {})
            self.state[param] = _exact_state(self._held[param].name, loaded, before[param])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient. Nothing is communicated.

        Args:
            closure: computes the loss again, with gradients.

        Raises:
            ValueError: a gradient is sparse or lies otherwise than its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [param for param in group["params"] if param.grad is not None]
            for param in used:
                _check_grad(self._held[param].name, param)
            for param in used:
                self.state[param]["step"] += 1
            for params in self._alike(used):
                self._step_alike(group, params)
        return loss

    def _alike(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        """Parameters that one batch can hold together: same row, format, dtype, device and step."""
        alike: dict[object, list[Tensor]] = defaultdict(list)
        for param in params:
            held = self._held[param]
            alone = id(param) if held.tiled else None
            step = self.state[param]["step"].item()
            key = (held.rows.num_cols, held.formats, param.dtype, param.device, step, alone)
            alike[key].append(param)
        return list(alike.values())

    def _step_alike(self, group: Group, params: Sequence[Tensor]) -> None:
        """Step parameters that can share batches."""
        held = [self._held[param] for param in params]
        matrices = [_matrices(param, h, self.state[param]) for param, h in zip(params, held, strict=True)]
        num_rows = tuple(h.rows.num_rows for h in held)
        numel = CACHE_NUMEL if params[0].device.type == "cpu" else DEVICE_NUMEL
        max_rows = max(1, numel // max(1, held[0].rows.num_cols))
        if held[0].tiled:
            max_rows = max(1, num_rows[0])
        step = int(self.state[params[0]]["step"].item())
        for pieces in batches_of_rows(num_rows, max_rows):
            _step_batch(group, held, matrices, pieces, step)


def _step_batch(
    group: Group, held: Sequence[Held], matrices: Sequence[State], pieces: Sequence[Piece], step: int
) -> None:
    """Step some rows: dequantize, update, quantize."""

    def views(name: str) -> list[Tensor]:
        return [matrices[piece.matrix][name][piece.start : piece.stop] for piece in pieces]

    rows, formats = held[pieces[0].matrix].rows, held[pieces[0].matrix].formats
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
        group: lr, betas, eps, weight_decay, maximize.
        step: number of this step, from one.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    grad = -grad if group["maximize"] else grad
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    if group["weight_decay"]:
        param.mul_(1 - lr * group["weight_decay"])
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    param.sub_(torch.div(exp_avg, denominator, out=denominator).mul_(lr / (1 - beta1**step)))


def _matrices(param: Tensor, held: Held, state: State) -> State:
    """Views (rows, cols) of this rank's parts of a parameter, its gradient and its moments."""
    assert param.grad is not None
    found = {"param": param, "grad": param.grad, **{k: v for k, v in state.items() if k != "step"}}
    if held.rows.first_place is not None:
        found["first_place"] = held.rows.first_place
    num_rows = held.rows.num_rows
    matrices = {}
    for name, value in found.items():
        part = local(value)
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


def _held_of(group: Group, group_index: int) -> dict[Tensor, Held]:
    """Every parameter of a group as it will be stepped, checked."""
    names = group.get("param_names") or [f"{i} of group {group_index}" for i in range(len(group["params"]))]
    return {p: _held(name, p, group) for name, p in zip(names, group["params"], strict=True)}


def _held(name: str, param: Tensor, group: Group) -> Held:
    _check_param(name, param)
    rows, formats = _rows_and_formats(name, param, group)
    return Held(name, rows if group["stochastic_rounding"] else rows._replace(first_place=None), formats)


def _rows_and_formats(
    name: str, param: Tensor, group: Group
) -> tuple[Rows, tuple[BlockFormat, BlockFormat] | None]:
    """Its rows, or blocks of rows, and how moments are stored; small ones are read element by element."""
    if param.ndim < 2 or param.numel() < group["min_numel"]:
        return elements_of(param), None
    tile_rows, block = group["tile"] or (1, group["block"])
    root = group["second_moment"] == "sqrt" or (group["second_moment"] is None and group["tile"] is not None)
    first = BlockFormat(block, group["bits"], group["format"])
    second = BlockFormat(block, group["bits"], group["format"], signed=False, square_root=root)
    require_whole_blocks(name, param, block=block, tile_rows=tile_rows)
    rows = rows_of(param, tile_rows)
    return rows.split(block) if tile_rows == 1 else rows, (first, second)


def _new_state(param: Tensor, held: Held, group: Group) -> State:
    """Zeros for a parameter, laid out as it is."""
    state = {"step": torch.tensor(0.0)}
    if held.formats is None:
        return state | {name: torch.zeros_like(param, dtype=torch.float32) for name in MOMENTS}
    cols, tile_rows = num_cols(param.shape), (group["tile"] or (1, 0))[0]
    for name, form in zip(MOMENTS, held.formats, strict=True):
        if form.bits == 8:
            state[f"{name}_codes"] = torch.zeros_like(param, dtype=torch.uint8)
        else:
            num_bytes = form.num_code_bytes(cols)
            state[f"{name}_codes"] = zeros_in_rows(param, num_bytes, tile_rows=1, dtype=torch.uint8)
        num_scales = form.num_scales(cols)
        scales = zeros_in_rows(param, num_scales, tile_rows=tile_rows, dtype=torch.float32)
        state[f"{name}_scales"] = scales
    return state


def _exact_state(name: str, loaded: Mapping[str, Any], own: State) -> State:
    """The loaded state in the dtypes and on the devices of this optimizer's own."""
    if not loaded:
        return {key: torch.zeros_like(value) for key, value in own.items()}
    state: State = {}
    for key, mine in own.items():
        theirs = loaded.get(key)
        given = theirs if isinstance(theirs, Tensor) else torch.tensor(0.0 if theirs is None else theirs)
        if theirs is None or not _lie_alike(given, mine):
            got = "nothing" if theirs is None else _drawn(given)
            raise ValueError(
                f"param {name!r}: expected its {key} to be {_drawn(mine)}, got {got}. Load through "
                "torch.distributed.checkpoint, or full tensors through "
                "shardkit.checkpoint.set_optimizer_state_dict."
            )
        state[key] = given.to(dtype=mine.dtype, device=mine.device)
    return state


def _check_saved_format(own: Sequence[Group], saved: Sequence[Mapping[str, Any]]) -> None:
    """Codes of one format mean nothing in another."""
    for index, (mine, theirs) in enumerate(zip(own, saved, strict=False)):
        for setting in FORMAT_SETTINGS:
            value = theirs.get(setting, mine[setting])
            value = tuple(value) if isinstance(value, list) else value
            if value != mine[setting]:
                raise ValueError(
                    f"group {index}: this optimizer has {setting}={mine[setting]!r}, and the state was saved "
                    f"with {value!r}. Construct AdamW8bit with {setting}={value!r}."
                )


def _check_settings(group: Group) -> None:
    tile, betas = group["tile"], group["betas"]
    expected = {
        "lr": (group["lr"] >= 0, "at least 0"),
        "betas": (all(0 <= beta < 1 for beta in betas), "in [0, 1)"),
        "eps": (group["eps"] >= 0, "at least 0"),
        "weight_decay": (group["weight_decay"] >= 0, "at least 0"),
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


def _check_param(name: str, param: Tensor) -> None:
    if not param.is_floating_point():
        raise TypeError(f"param {name!r}: expected real numbers, got {param.dtype}. Leave it out.")
    if local(param).is_meta:
        raise ValueError(f"param {name!r} is on meta. Materialise the model before making its optimizer.")
    if not local(param).is_contiguous():
        raise ValueError(f"param {name!r} is not contiguous, so its rows are not. Make it contiguous.")


def _check_grad(name: str, param: Tensor) -> None:
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise ValueError(
            f"param {name!r}: its gradient is sparse. Give it an optimizer for sparse gradients."
        )
    if not _lie_alike(grad, param):
        raise ValueError(
            f"param {name!r}: it is {_drawn(param)}, and its gradient {_drawn(grad)}. Redistribute the "
            "gradient to the placements of the parameter before step()."
        )


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape and the same part of it on every rank."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return isinstance(a, RaggedTensor) == isinstance(b, RaggedTensor) and same_layout(
            spec_of(a), spec_of(b)
        )
    return isinstance(a, DTensor) == isinstance(b, DTensor) and a.shape == b.shape


def _drawn(tensor: Tensor) -> str:
    placed = f" placed {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)}{placed}"
