"""What a sharded model consists of, holds and sends, before it runs: `print(model_plan(model))`.

Level 14 of the data flow: reads units and buckets, and gives values. Nothing is sent or allocated, so it
works on meta, on a fake process group, before and after training.

    unit      params  layout        dtypes          shard  unsharded   padding  gather  reduce  reshard
    blocks.0      12  Shard(0) 1x4  fp32>bf16>fp32  4 MiB      8 MiB  0 B 0.0%  12 MiB  12 MiB  yes

The ranks are replicas x shards, the dtypes those at rest, in compute and on the wire; `reshard` is what
happens after forward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import nn

from shardkit._torch import inner_tensors
from shardkit.bucket import Bucket
from shardkit.collectives import num_scratch_rows
from shardkit.interop import unit_of, units_in
from shardkit.layout import Layout, RaggedSource, ReduceLayout, reduce_layout
from shardkit.schedule import BucketBytes, UnitBytes, peak_bytes, reshards_after_forward
from shardkit.unit import Unit


class Dtypes(NamedTuple):
    """A bucket's dtypes: of the shards at rest, of the gathered parameters, of the gradients on the wire."""

    rest: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True, slots=True)
class BucketReport:
    """The parameters that travel in one collective. Bytes are of one rank unless they say otherwise."""

    params: tuple[str, ...]  # dotted names
    layout: str  # the placements on the shard axis, such as "Shard(0)" or "ragged"
    shard_size: int
    replicate_size: int
    dtypes: Dtypes
    shard_bytes: int  # at rest
    unsharded_bytes: int  # gathered rows of all ranks, padding included
    padding_bytes: int  # of those, what belongs to no parameter
    gather_bytes: int  # this rank sends in the gathers of one step
    reduce_bytes: int  # this rank sends in the reductions of one step


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One `fully_shard` call."""

    name: str
    buckets: tuple[BucketReport, ...]
    reshard_after_forward: bool | int  # what it comes to: the root's None is False
    settings: tuple[str, ...]  # "name=value" of what differs from its default


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The units of a model, in the order in which their forwards end; `print` shows a table with totals.

    A step is a forward and a backward in which every unit runs once, with the settings of this moment.
    """

    units: tuple[UnitReport, ...]
    peak_bytes: int  # see `predicted_peak_bytes`

    def __str__(self) -> str:
        settings = [f"{unit.name}: {', '.join(unit.settings)}" for unit in self.units if unit.settings]
        peak = f"predicted peak of parameters and gradients: {format_bytes(self.peak_bytes)} a rank"
        return "\n".join([*_table(self.units), *settings, peak])


def model_plan(model: nn.Module) -> ModelPlan:
    """What each unit and bucket below `model` holds, pads and sends; local, nothing is communicated.

    Raises:
        ValueError: no module of the model is sharded.
    """
    units = _units_of(model)
    return ModelPlan(tuple(_report_unit(unit) for unit in units), _peak_bytes(units))


def predicted_peak_bytes(model: nn.Module) -> int:
    """The most bytes of parameters and gradients alive at once on this rank, in a step from no gradients.

    Shards, gathered parameters, gradients in all forms, and buffers on the wire; activations, optimizer
    state and what an operator allocates inside itself are left out. On the CPU it is within 5 % of what is
    measured. On an accelerator it adds one unit's gathered parameters, which are freed late.

    Raises:
        ValueError: no module of the model is sharded.
    """
    return _peak_bytes(_units_of(model))


def format_bytes(nbytes: int) -> str:
    """Three digits and a binary unit: 1536 is '1.5 KiB'."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _units_of(model: nn.Module) -> list[Unit]:
    units = units_in(model)
    if not units:
        raise ValueError(
            f"model_plan: no module of this {type(model).__name__} is sharded. Call fully_shard on it first."
        )
    return units


# ---------------------------------------------------------------- units and buckets


def _report_unit(unit: Unit) -> UnitReport:
    setting = _reshard_after_forward(unit)
    buckets = tuple(_report_bucket(unit, bucket) for bucket in unit.buckets)
    return UnitReport(unit.name, buckets, setting, tuple(_changed_settings(unit)))


def _reshard_after_forward(unit: Unit) -> bool | int:
    setting = unit.settings.reshard_after_forward
    if reshards_after_forward(setting, is_root=unit.is_root, with_grad=True, pinned=unit.is_pinned):
        return True if setting is None else setting
    return False


def _report_bucket(unit: Unit, bucket: Bucket) -> BucketReport:
    spec, layout = bucket.spec, bucket.spec.layout
    return BucketReport(
        params=tuple(param.name for param in bucket.params),
        layout=_layout_kind(layout),
        shard_size=spec.axes.shard_size,
        replicate_size=spec.axes.replicate_size,
        dtypes=Dtypes(spec.dtype, spec.compute_dtype, spec.reduce_dtype),
        shard_bytes=_shard_bytes(bucket),
        unsharded_bytes=layout.numel * spec.compute_dtype.itemsize,
        padding_bytes=layout.padding_numel * spec.compute_dtype.itemsize,
        gather_bytes=_gather_bytes(unit, bucket),
        reduce_bytes=_reduce_bytes(unit, bucket),
    )


def _shard_bytes(bucket: Bucket) -> int:
    """Of the shard buffer, or of the users' own tensors."""
    own = [param.local for param in bucket.params if param.is_extended]
    return bucket.gather.shard.nbytes + sum(t.nbytes for local in own for t in inner_tensors(local))


def _layout_kind(layout: Layout) -> str:
    if isinstance(layout.source, RaggedSource):
        return "ragged"
    return ", ".join(f"Shard({dim})" for dim in sorted({param.dim for param in layout.source}))


def _gather_bytes(unit: Unit, bucket: Bucket) -> int:
    """Sent in forward, and once more in backward where the parameters were freed."""
    spec = bucket.spec
    row_bytes = spec.layout.row_numel * spec.compute_dtype.itemsize
    sent = (spec.layout.num_ranks - 1) * row_bytes
    setting = _reshard_after_forward(unit)
    if setting is False or not unit.settings.unshard_in_backward:
        return sent
    if setting is True or bucket.gather.small_group is None:
        return 2 * sent
    return sent + (setting - 1) * spec.layout.num_ranks // setting * row_bytes


def _reduce_bytes(unit: Unit, bucket: Bucket) -> int:
    settings, axes = unit.settings, bucket.spec.axes
    reduced = _reduce_layout(bucket)
    if reduced is None or not settings.gradient_sync:
        return 0
    itemsize = bucket.spec.reduce_dtype.itemsize
    row_bytes, sent = reduced.row_numel * itemsize, reduced.sent_numel * itemsize
    if settings.reduce.all_reduce:
        sent += 2 * (axes.replicate_size - 1) * row_bytes // axes.replicate_size
    return sent


def _reduce_layout(bucket: Bucket) -> ReduceLayout | None:
    """How the bucket's gradients are reduced, if any of its parameters trains."""
    if not (trainable := _trainable(bucket)):
        return None
    return reduce_layout(bucket.spec.layout, trainable, bucket.grads.direct_of(trainable))


def _trainable(bucket: Bucket) -> list[int]:
    return [index for index, param in enumerate(bucket.params) if param.sharded.requires_grad]


def _changed_settings(unit: Unit) -> list[str]:
    """What differs from the defaults, as it was set; reshard_after_forward has a column of its own."""
    default = type(unit.settings)()
    changed = []
    for owner, initial in ((unit.settings, default), (unit.settings.reduce, default.reduce)):
        for name in initial.__dataclass_fields__:
            value = getattr(owner, name)
            if name not in ("reshard_after_forward", "reduce") and value != getattr(initial, name):
                changed.append(f"{name}={_told(value)}")
    return changed


def _told(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(unit.name for unit in value)}]"
    return getattr(value, "__name__", str(value))


# ---------------------------------------------------------------- peak


def _peak_bytes(units: Sequence[Unit]) -> int:
    limit = max(unit.settings.max_input_buffers for unit in units)
    listed = [_unit_bytes(unit) for unit in units]
    peak = peak_bytes(listed, max_reductions=limit)
    runs_ahead = any(unit.tree.streams.runs_ahead for unit in units)
    return peak + max(unit.unsharded for unit in listed) if runs_ahead else peak


def _unit_bytes(unit: Unit) -> UnitBytes:
    offloads = unit.policy.offloads and unit.policy.device.type != "cpu"
    own = (unit, None)
    below = {unit_of(module) for root in unit.modules for module in root.modules()}.difference(own)
    before = set(takewhile(lambda module: unit_of(module) in own, unit.modules[0].modules()))
    buckets = tuple(
        replace(_bucket_bytes(bucket, offloads), late=_late_bytes(bucket, before if below else ()))
        for bucket in unit.buckets
    )
    setting = _reshard_after_forward(unit)
    if isinstance(setting, bool):
        kept = 0 if setting else sum(bucket.unsharded for bucket in buckets)
    else:
        kept = sum(_piece_bytes(bucket, setting) for bucket in unit.buckets)
    loose, first = _loose_bytes(unit)
    return UnitBytes(buckets, loose, first, kept, num_inner=len(below))


def _bucket_bytes(bucket: Bucket, offloads: bool) -> BucketBytes:
    spec, layout, gather = bucket.spec, bucket.spec.layout, bucket.gather
    copies_out = not layout.in_place or gather.comm is not None
    gathered_numel = layout.numel if layout.in_place else layout.unsharded_numel
    reduced = _reduce_layout(bucket)
    rows = row = scratch = grad = 0
    if reduced is not None:
        rows = (reduced.direct_numel + reduced.rows.numel) * spec.reduce_dtype.itemsize
        row = reduced.row_numel * spec.reduce_dtype.itemsize
        grad = 0 if offloads else reduced.row_numel * spec.dtype.itemsize
        if bucket.grads.route is not None and layout.num_ranks > 1 and bucket.grads.comm is None:
            scratch = num_scratch_rows(bucket.grads.route) * row
    return BucketBytes(
        shard=0 if offloads else _shard_bytes(bucket),
        transit=layout.numel * spec.compute_dtype.itemsize if copies_out else 0,
        unsharded=gathered_numel * spec.compute_dtype.itemsize,
        rows=rows,
        row=row if layout.num_ranks > 1 else 0,
        scratch=scratch,
        grad=grad,
        casts=spec.dtype != spec.reduce_dtype,
    )


def _late_bytes(bucket: Bucket, before: Collection[nn.Module]) -> int:
    """Gradients that stay as they are, of modules that run `before` the units inside."""
    direct = bucket.grads.direct_of(_trainable(bucket))
    late = [i for i in direct if all(owner.module in before for owner in bucket.params[i].owners)]
    return sum(bucket.spec.layout.slots[i].numel for i in late) * bucket.spec.reduce_dtype.itemsize


def _piece_bytes(bucket: Bucket, num_ranks: int) -> int:
    if bucket.gather.small_group is None:
        return 0
    return bucket.spec.layout.numel // num_ranks * bucket.spec.compute_dtype.itemsize


def _loose_bytes(unit: Unit) -> tuple[int, int]:
    """Gradients that are alive at once outside the rows, and the first that stays as it is.

    See [Note: rows of gradients].
    """
    at_once, first, swept = [0], [0], 0
    for bucket in unit.buckets:
        spec, grads = bucket.spec, bucket.grads
        trainable = _trainable(bucket)
        stay = grads.direct_of(trainable) if spec.compute_dtype == spec.reduce_dtype else ()
        for index in trainable:
            nbytes = spec.layout.slots[index].numel * spec.compute_dtype.itemsize
            if index in grads.swept or unit.tree.streams.runs_ahead:
                swept += nbytes
            else:
                (first if index in stay else at_once).append(nbytes)
    return swept + max(at_once), max(first)


# ---------------------------------------------------------------- the table

_COLUMNS = (
    ("unit", str.ljust),
    ("params", str.rjust),
    ("layout", str.ljust),
    ("dtypes", str.ljust),
    ("shard", str.rjust),
    ("unsharded", str.rjust),
    ("padding", str.rjust),
    ("gather", str.rjust),
    ("reduce", str.rjust),
    ("reshard", str.ljust),
)


def _table(units: Sequence[UnitReport]) -> list[str]:
    titles = tuple(title for title, _ in _COLUMNS)
    rows = [titles, *(line for unit in units for line in _lines_of(unit)), _total(units)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = zip(_COLUMNS, widths, strict=True)
    align = [(pad, width) for (_, pad), width in cells]
    return [
        "  ".join(pad(cell, width) for cell, (pad, width) in zip(row, align, strict=True)).rstrip()
        for row in rows
    ]


def _lines_of(unit: UnitReport) -> list[tuple[str, ...]]:
    """A line a bucket; one without sizes where the unit has no parameters of its own."""
    setting = unit.reshard_after_forward
    reshard = ("yes" if setting else "no") if isinstance(setting, bool) else f"to 1/{setting}"
    if not unit.buckets:
        return [(unit.name, "0", *("",) * 7, reshard)]
    return [
        (
            unit.name if len(unit.buckets) == 1 else f"{unit.name} [{index}]",
            str(len(bucket.params)),
            f"{bucket.layout} {bucket.replicate_size}x{bucket.shard_size}",
            _told_dtypes(bucket.dtypes),
            *_sizes([bucket]),
            reshard,
        )
        for index, bucket in enumerate(unit.buckets)
    ]


def _told_dtypes(dtypes: Dtypes) -> str:
    names = [
        str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp") for dtype in dtypes
    ]
    return names[0] if len(set(names)) == 1 else ">".join(names)


def _total(units: Sequence[UnitReport]) -> tuple[str, ...]:
    buckets = [bucket for unit in units for bucket in unit.buckets]
    num_params = sum(len(bucket.params) for bucket in buckets)
    return (f"{len(units)} units", str(num_params), "", "", *_sizes(buckets), "")


def _sizes(buckets: Sequence[BucketReport]) -> tuple[str, ...]:
    unsharded = sum(bucket.unsharded_bytes for bucket in buckets)
    padding = sum(bucket.padding_bytes for bucket in buckets)
    return (
        format_bytes(sum(bucket.shard_bytes for bucket in buckets)),
        format_bytes(unsharded),
        f"{format_bytes(padding)} {padding / max(unsharded, 1):.1%}",
        format_bytes(sum(bucket.gather_bytes for bucket in buckets)),
        format_bytes(sum(bucket.reduce_bytes for bucket in buckets)),
    )
