"""Views, new tensors and random fills of a RaggedTensor.

Level 6 of the data flow; registers its rules in `ragged_ops.py`. A view is possible where the elements it
shows are contiguous in row-major order, for then each rank's part is a contiguous part of its local tensor:

    t of (5, 3), ranks hold 1, 4 and 0 rows     t[1:3] of (2, 3): ranks hold 0, 2 and 0 rows
                                                t[1] of (3,): whole on rank 1, RaggedShard((), (0, 1, 0))
                                                t.view(15): ranks hold 3, 12 and 0 elements

Views share memory with their base; one that could not, such as t[:, 1:], raises.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit._torch import DTensorSpec, OpOverload, local_of, meta_of, new_dtensor, spec_of
from shardkit.boxes import sharded_shape
from shardkit.placement import RaggedShard
from shardkit.ragged_ops import Args, Kwargs, base_name, dims_from_front, named_arguments, refuse, rule, wrap
from shardkit.specs import coordinate_of, layout_of, ragged_of, spec_with

DRAW_NUMEL = 1 << 18  # elements drawn from one seed; a shard draws at most two such blocks more than it keeps


@rule("view _unsafe_view reshape _reshape_alias unsqueeze squeeze")
def same_elements(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> DTensor:
    """Another shape for the same elements in the same order."""
    tensor = cast(DTensor, args[0])
    if isinstance(args[-1], torch.dtype):
        refuse(func, "no view as another dtype. Use to_local().view(dtype).")
    shape = func(torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs).shape
    return flat_view(cls, func, tensor, 0, tuple(shape))


@rule("slice select unbind split split_with_sizes")
def whole_rows(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Ranges of the first dim."""
    tensor, named = cast(DTensor, args[0]), named_arguments(func, args, kwargs)
    (dim,) = dims_from_front(func, [cast(int, named["dim"])], tensor.ndim)
    num_rows, row_shape = tensor.shape[dim], tuple(tensor.shape[1:])
    row_numel, kind = math.prod(row_shape), base_name(func)
    if kind == "slice":
        start, end, step = (cast(int | None, named[name]) for name in ("start", "end", "step"))
        rows = range(num_rows)[slice(start, end, step)]
        if rows == range(num_rows):
            return wrap(cls, local_of(tensor).detach(), spec_of(tensor))
    if dim:
        refuse(func, f"dim {dim} of a RaggedTensor; only rows, dim 0, can be indexed. Use to_local().")
    if kind == "slice":
        if rows.step != 1:
            refuse(func, f"a step of {rows.step}. Use to_local().")
        return flat_view(cls, func, tensor, rows.start * row_numel, (len(rows), *row_shape))
    if kind in ("select", "unbind"):
        picked = range(num_rows) if kind == "unbind" else [range(num_rows)[cast(int, named["index"])]]
        views = [flat_view(cls, func, tensor, row * row_numel, row_shape) for row in picked]
        return views if kind == "unbind" else views[0]
    sizes = [part.shape[0] for part in func(torch.empty(num_rows, device="meta"), args[1], 0)]
    starts = [0, *accumulate(sizes)]
    return [
        flat_view(cls, func, tensor, start * row_numel, (size, *row_shape))
        for start, size in zip(starts, sizes, strict=False)
    ]


def flat_view(
    cls: type[DTensor], func: OpOverload, tensor: DTensor, start: int, shape: tuple[int, ...]
) -> DTensor:
    """The elements from `start` on in row-major order, seen as a tensor of `shape`; shares memory."""
    spec = spec_of(tensor)
    axis, ragged = ragged_of(spec)
    if any(not isinstance(p, Replicate) for p in spec.placements if p is not ragged):
        refuse(func, f"a view of {spec.placements}, where another mesh axis cuts too. Use to_local().")
    rank, stop = coordinate_of(spec.mesh)[axis], start + math.prod(shape)
    ends = list(accumulate(ragged.local_numels(meta_of(spec).shape)))
    begins = [0, *ends[:-1]]
    numels = [max(0, min(stop, end) - max(start, begin)) for begin, end in zip(begins, ends, strict=True)]
    placements: list[Placement] = list(spec.placements)
    placements[axis] = placement = RaggedShard.from_numels(shape, numels)
    skip = max(0, start - begins[rank]) if numels[rank] else 0
    local = local_of(tensor).view(-1).narrow(0, skip, numels[rank]).view(placement.local_shape(shape, rank))
    return new_dtensor(
        cls, local, spec_with(spec, meta_of(spec).dtype, shape, tuple(placements)), requires_grad=False
    )


@rule("expand")
def expand(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Repeat dims of size 1 behind the cut ones, as a copy: the gradient of a row sum needs it."""
    tensor, sizes = cast(DTensor, args[0]), cast(list[int], args[1])
    shape = tuple(torch.empty(tensor.shape, device="meta").expand(sizes).shape)
    spec = spec_of(tensor)
    _, ragged = ragged_of(spec)
    prefix = len(ragged.dims)
    cut = [p.dim for p in spec.placements if isinstance(p, Shard)]
    if len(shape) != tensor.ndim or any(shape[dim] != tensor.shape[dim] for dim in (*range(prefix), *cut)):
        refuse(
            func, f"from {tuple(tensor.shape)} to {shape} would repeat dims that are cut. Use full_tensor()."
        )
    local = local_of(tensor)
    suffix = [local.shape[d - prefix + 1] if d in cut else shape[d] for d in range(prefix, len(shape))]
    repeated = local.expand(local.shape[0], *suffix).clone(memory_format=torch.contiguous_format)
    return wrap(cls, repeated, spec_with(spec, meta_of(spec).dtype, shape))


@rule("new_empty new_zeros new_ones new_full new_empty_strided")
def new_tensor(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """A new tensor: in this layout if it has this shape, else replicated, as stock DTensor does."""
    tensor, size = cast(DTensor, args[0]), torch.Size(cast(list[int], args[1]))
    local, spec = local_of(tensor), spec_of(tensor)
    if base_name(func) == "new_empty_strided":
        func, args = torch.ops.aten.new_empty.default, (tensor, size)
    if size == tensor.shape:
        return wrap(cls, func(local, local.shape, *args[2:], **kwargs), spec)
    made = func(local, size, *args[2:], **kwargs)
    replicate = tuple(Replicate() for _ in spec.placements)
    made_spec = spec_with(spec, made.dtype, tuple(size), replicate)
    return new_dtensor(DTensor, made, made_spec, requires_grad=False)


@rule("uniform_ normal_ exponential_ geometric_ log_normal_ cauchy_ random_ bernoulli_")
def random_fill(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> DTensor:
    """Fill with random numbers that do not depend on how the ragged axis is cut.

    One seed is drawn from the generator (on all ranks alike, so that it stays in step where it was) and
    shared with the replicas. The elements are drawn in blocks, each from a generator of its own seeded by
    (seed, block), and a rank draws the blocks that its part meets.
    """
    tensor = cast(DTensor, args[0])
    local = local_of(tensor)
    if any(isinstance(arg, torch.Tensor) for arg in args[1:]):
        refuse(func, "a tensor of probabilities. Compare torch.rand_like(tensor) with it instead.")
    if local.is_meta:
        return tensor
    seed, flat = _shared_seed(tensor, cast(torch.Generator | None, kwargs.get("generator"))), local.view(-1)
    start, total = _flat_start(spec_of(tensor))
    generator = torch.Generator(local.device)
    for begin in range(start - start % DRAW_NUMEL, start + local.numel(), DRAW_NUMEL):
        draw = local.new_empty(min(DRAW_NUMEL, total - begin))
        func(draw, *args[1:], **{**kwargs, "generator": generator.manual_seed(seed + begin // DRAW_NUMEL)})
        low, high = max(start, begin), min(start + local.numel(), begin + draw.numel())
        flat[low - start : high - start] = draw[low - begin : high - begin]
    return tensor


@rule("rand_like randn_like randint_like")
def random_like(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """A new tensor of random numbers in the same layout."""
    options = {name: value for name, value in kwargs.items() if name not in ("generator", "memory_format")}
    aten, generator = torch.ops.aten, kwargs.get("generator")
    made: torch.Tensor = aten.empty_like(args[0], **options)
    if base_name(func) == "rand_like":
        aten.uniform_(made, 0.0, 1.0, generator=generator)
    elif base_name(func) == "randn_like":
        aten.normal_(made, 0.0, 1.0, generator=generator)
    else:
        aten.random_(made, *(args[1:] if len(args) == 3 else (0, args[1])), generator=generator)
    return made


def _shared_seed(tensor: DTensor, generator: torch.Generator | None) -> int:
    """A seed drawn here and, on mesh axes that replicate the tensor, taken from their first rank."""
    spec = spec_of(tensor)
    device = local_of(tensor).device if generator is None else generator.device
    seed = torch.randint(1 << 62, (1,), generator=generator, device=device).to(local_of(tensor).device)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate) and spec.mesh.size(axis) > 1:
            dist.broadcast(seed, group=spec.mesh.get_group(axis), group_src=0)
    # ranks that a Shard sets apart hold different elements, and draw different numbers for them
    apart = 0
    for at, axis_size, placement in zip(
        coordinate_of(spec.mesh), spec.mesh.shape, spec.placements, strict=True
    ):
        if not isinstance(placement, Replicate | RaggedShard):
            apart = apart * axis_size + at
    return (int(seed) + 0x9E3779B97F4A7C15 * apart) % (1 << 62)


def _flat_start(spec: DTensorSpec) -> tuple[int, int]:
    """Where this rank's part starts among the elements that the ragged axis cuts, and how many those are."""
    axis, ragged = ragged_of(spec)
    coordinate = coordinate_of(spec.mesh)
    shape = sharded_shape(layout_of(spec), coordinate)
    return sum(ragged.local_numels(shape)[: coordinate[axis]]), math.prod(shape)
