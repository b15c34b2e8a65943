"""Sums, norms, extremes and comparisons of a RaggedTensor, exact at every layout.

Level 6 of the data flow; registers its rules in `ragged_ops.py`. A reduction over dims that no axis cuts
stays on the rank and its result is ragged like its input. Any other one reduces what the rank holds, puts the
result where it belongs in a tensor filled with the operation's identity, and all-reduces over the ragged
axis; its result is a stock DTensor. With (5, 3) cut inside rows after 4 elements, the sum along dim 1 on the
first rank:

    holds a0 a1 a2 b0    whole rows, rest identity    sums     placed among 5 rows, then all-reduced
                         | a0 a1 a2 |                 A        A  b0  0  0  0
                         | b0  0  0 |                 b0

Collective over the mesh axes that cut the reduced dims: all ranks must call. A p-norm of the whole tensor is
left pending, as stock DTensor leaves it, so that clip_grad_norm_ communicates once for all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit import _torch
from shardkit._torch import DTensorSpec, OpOverload, local_of, meta_of, new_dtensor, op_arguments, spec_of
from shardkit.boxes import sharded_shape
from shardkit.placement import RaggedShard
from shardkit.ragged_ops import (
    Args,
    Kwargs,
    aligned,
    base_name,
    dims_from_front,
    named_arguments,
    pointwise,
    refuse,
    rule,
    wrap,
)
from shardkit.specs import coordinate_of, layout_of, ragged_of, sharded_axes, spec_with

Number = bool | int | float
Local = Callable[[torch.Tensor, list[int], bool], torch.Tensor]  # (tensor, dims, keepdim) -> reduced


@dataclass(frozen=True, slots=True)
class Fold:
    """An associative reduction: on one rank, across ranks, and the value that changes nothing."""

    local: Local
    across: str
    identity: Callable[[torch.dtype], Number]


def _lowest(dtype: torch.dtype) -> Number:
    return False if dtype == torch.bool else -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Number:
    return True if dtype == torch.bool else math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _prod(tensor: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        tensor = tensor.prod(dim, keepdim)
    return tensor


SUM = Fold(lambda t, dims, keepdim: t.sum(dims, keepdim), "sum", lambda dtype: 0)
PROD = Fold(_prod, "product", lambda dtype: 1)
MAX = Fold(lambda t, dims, keepdim: t.amax(dims, keepdim), "max", _lowest)
MIN = Fold(lambda t, dims, keepdim: t.amin(dims, keepdim), "min", _highest)


def reduce(cls: type[DTensor], tensor: DTensor, fold: Fold, dims: Sequence[int], keepdim: bool) -> DTensor:
    """Fold `tensor` over `dims`, counted from the front (none given: all)."""
    spec = spec_of(tensor)
    axis, ragged = ragged_of(spec)
    dims = sorted(dims or range(tensor.ndim)) if tensor.ndim else []
    prefix, coordinate = len(ragged.dims), coordinate_of(spec.mesh)
    local, shape = local_of(tensor), sharded_shape(layout_of(spec), coordinate)
    identity = fold.identity(local.dtype)
    axes = [a for a, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim in dims]
    # ranks that cut a reduced dim may hold other units each, so what they reduce is no part of one layout
    stays_ragged = bool(prefix and dims and dims[0] >= prefix and not axes)
    if stays_ragged:
        reduced = _local_fold(fold, local, [dim - prefix + 1 for dim in dims], keepdim, identity)
    else:
        axes = sorted([*axes, axis])
        if len(dims) == tensor.ndim:
            reduced = _local_fold(fold, local, list(range(local.ndim)), False, identity)
            reduced = reduced.reshape((1,) * tensor.ndim) if keepdim else reduced
        else:
            rows, first = _whole_rows(local, ragged, shape, coordinate[axis], identity)
            reduced = _local_fold(fold, rows, dims, keepdim, identity)
            if dims[0] != 0:
                full = reduced.new_full((shape[0], *reduced.shape[1:]), identity)
                full[first : first + len(rows)] = reduced
                reduced = full
    for reduced_axis in axes:
        reduced = _across(reduced, fold.across, spec.mesh, reduced_axis)
    return _wrap_reduced(cls, reduced, spec, dims, keepdim, stays_ragged)


def _local_fold(
    fold: Fold, local: torch.Tensor, dims: list[int], keepdim: bool, identity: Number
) -> torch.Tensor:
    """Fold on this rank; one that holds nothing has the identity, where torch may raise."""
    if local.numel():
        return fold.local(local, dims, keepdim)
    shape = torch.empty(local.shape, device="meta").sum(dims, keepdim).shape
    return fold.local(local.new_full((1,), identity), [0], False).expand(shape).clone()


def _whole_rows(
    local: torch.Tensor, ragged: RaggedShard, shape: tuple[int, ...], rank: int, identity: Number
) -> tuple[torch.Tensor, int]:
    """The local elements within whole rows of dim 0, the rest `identity`; and the first row's index."""
    if len(ragged.dims) == 1:
        return local, ragged.start_unit(rank)
    if not ragged.dims:  # one rank has the whole, as its only unit
        return local.view(local.shape[0] * shape[0], *shape[1:]), 0
    units_of_row = max(1, math.prod(shape[1 : len(ragged.dims)]))
    start, units = ragged.start_unit(rank), ragged.local_units[rank]
    first, stop = start // units_of_row, -(-(start + units) // units_of_row)
    rows = local.new_full(((stop - first) * units_of_row, *local.shape[1:]), identity)
    rows[start - first * units_of_row :][:units] = local
    return rows.view(stop - first, *shape[1:]), first


def _across(value: torch.Tensor, reduce_op: str, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """All-reduce over one mesh axis; a NaN anywhere gives NaN, which backends do not promise."""
    if value.dtype == torch.bool:
        return _torch.all_reduce(value.to(torch.uint8), reduce_op, mesh, axis) != 0
    if reduce_op in ("sum", "product") or not value.is_floating_point():
        return _torch.all_reduce(value, reduce_op, mesh, axis)
    sign = 1 if reduce_op == "max" else -1
    is_nan = value.isnan()
    both = torch.stack([(sign * value).masked_fill(is_nan, -math.inf), is_nan.to(value.dtype)])
    extreme, any_nan = _torch.all_reduce(both, "max", mesh, axis)
    result: torch.Tensor = (sign * extreme).masked_fill(any_nan > 0, math.nan)
    return result


def _wrap_reduced(
    cls: type[DTensor],
    reduced: torch.Tensor,
    spec: DTensorSpec,
    dims: list[int],
    keepdim: bool,
    is_ragged: bool,
) -> DTensor:
    """The result's layout: axes that cut a reduced dim now replicate, other shards follow their dim."""

    def after(placement: Placement) -> Placement:
        if isinstance(placement, Shard) and placement.dim not in dims:
            return placement if keepdim else Shard(placement.dim - sum(dim < placement.dim for dim in dims))
        return placement if is_ragged and isinstance(placement, RaggedShard) else Replicate()

    sizes = [1 if dim in dims else size for dim, size in enumerate(meta_of(spec).shape)]
    shape = sizes if keepdim else [size for dim, size in enumerate(sizes) if dim not in dims]
    placements = tuple(map(after, spec.placements))
    return new_dtensor(
        cls if is_ragged else DTensor,
        reduced,
        spec_with(spec, reduced.dtype, tuple(shape), placements),
        requires_grad=False,
    )


@rule("sum prod")
def sum_or_prod(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Sums and products; 16-bit floats are accumulated in float32 and rounded once, as on one device."""
    named, fold = named_arguments(func, args, kwargs), PROD if base_name(func) == "prod" else SUM
    tensor, dtype = cast(DTensor, args[0]), cast(torch.dtype | None, named.get("dtype"))
    wide, dtype = _accumulator(tensor, dtype)
    result = reduce(cls, wide, fold, _dims(func, named, tensor), bool(named.get("keepdim")))
    return result if dtype is None else result.to(dtype)


@rule("mean")
def mean(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """The sum over the global count: shards of unequal size weigh by what they hold."""
    named, tensor = named_arguments(func, args, kwargs), cast(DTensor, args[0])
    wide, dtype = _accumulator(tensor, cast(torch.dtype | None, named.get("dtype")))
    _check_floating(func, wide)
    result = _mean(cls, wide, _dims(func, named, tensor), bool(named.get("keepdim")))
    return result if dtype is None else result.to(dtype)


@rule("var std var_mean std_mean")
def var(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Around the global mean, which is reduced first."""
    named, tensor = named_arguments(func, args, kwargs), cast(DTensor, args[0])
    dims, keepdim = _dims(func, named, tensor), bool(named.get("keepdim"))
    correction = named.get("correction")
    if correction is None:
        correction = int(bool(named.get("unbiased", True)))
    wide, dtype = _accumulator(tensor, None)
    _check_floating(func, wide)
    if tensor.dtype.is_complex:
        refuse(func, f"of {tensor.dtype}. Use full_tensor().")
    around = wide - _mean(cls, wide, dims, True)
    total = reduce(cls, cast(DTensor, around * around), SUM, dims, keepdim)
    result: torch.Tensor = total / max(0.0, _count(tensor, dims) - cast(float, correction))
    result = result.sqrt() if base_name(func).startswith("std") else result
    results = [result, _mean(cls, wide, dims, keepdim)] if base_name(func).endswith("_mean") else [result]
    results = [item if dtype is None else item.to(dtype) for item in results]
    return tuple(results) if len(results) > 1 else results[0]


@rule("amax amin any all")
def extreme(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> DTensor:
    """Largest or smallest element; any and all are those of a boolean tensor."""
    named, name = named_arguments(func, args, kwargs), base_name(func)
    tensor = cast(DTensor, args[0])
    if name in ("any", "all") and tensor.dtype != torch.bool:
        tensor = cast(DTensor, tensor != 0)
    fold, dims = MAX if name in ("amax", "any") else MIN, _dims(func, named, tensor)
    if name in ("amax", "amin"):
        _check_some(func, tensor, dims)
    return reduce(cls, tensor, fold, dims, bool(named.get("keepdim")))


@rule("max min cumsum cumprod argmax argmin _softmax _log_softmax logsumexp sort topk")
def along_suffix(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Operators along one dim that is not cut run on the rank; max and min have two other forms."""
    if "other" in (argument.name for argument in op_arguments(func)):
        return pointwise(cls, func, args, kwargs)
    named, tensor = named_arguments(func, args, kwargs), cast(DTensor, args[0])
    name, spec = base_name(func), spec_of(tensor)
    if name in ("max", "min") and "dim" not in named:
        _check_some(func, tensor, [])
        return reduce(cls, tensor, MAX if name == "max" else MIN, [], False)
    _, ragged = ragged_of(spec)
    dims, prefix = _dims(func, named, tensor), len(ragged.dims)
    if any(isinstance(p, Shard) for p in spec.placements):
        refuse(func, f"of {spec.placements}, where another mesh axis cuts too. Use full_tensor().")
    if len(dims) != 1 or prefix == 0 or dims[0] < prefix:
        refuse(func, f"along dims {dims}, of which {ragged} cuts some. Use full_tensor().")
    local_dim = dims[0] - prefix + 1
    named["dim"] = [local_dim] if isinstance(named["dim"], list) else local_dim
    positional = [named[a.name] for a in op_arguments(func)[1:] if not a.kwarg_only]
    results = func(local_of(tensor), *positional, **kwargs)
    first = results if isinstance(results, torch.Tensor) else results[0]
    shape = (*tensor.shape[:prefix], *first.shape[1:])
    return wrap(cls, results, spec_with(spec, tensor.dtype, shape))


@rule("norm linalg_vector_norm")
def norm(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """A p-norm; of the whole tensor it is left pending, see the module."""
    named, tensor = named_arguments(func, args, kwargs), cast(DTensor, args[0])
    order = named.get("ord", named.get("p"))
    order = 2.0 if order is None else float(cast(float, order))
    dims, keepdim = _dims(func, named, tensor), bool(named.get("keepdim"))
    dtype = cast(torch.dtype | None, named.get("dtype"))
    _check_floating(func, tensor)
    if math.isinf(order):
        _check_some(func, tensor, dims)
    if _is_power(order) and len(dims) in (0, tensor.ndim) and not keepdim:
        return _pending_norm(
            torch.linalg.vector_norm(local_of(tensor), order, dtype=dtype), spec_of(tensor), order
        )
    wide, out_dtype = _accumulator(tensor, dtype)
    result = _dim_norm(cls, cast(DTensor, wide.abs()), order, dims, keepdim)
    return result if out_dtype is None else result.to(out_dtype)


@rule("_foreach_norm")
def foreach_norm(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """One pending norm a tensor."""
    named = named_arguments(func, args, kwargs)
    tensors, order = cast(list[torch.Tensor], args[0]), float(cast(float, named["ord"]))
    dtype = cast(torch.dtype | None, named["dtype"])
    if not _is_power(order) or any(type(tensor) is not cls for tensor in tensors):
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    ragged = cast(list[DTensor], tensors)
    norms = torch._foreach_norm(list(map(local_of, ragged)), order, dtype=dtype)
    return [_pending_norm(n, spec_of(tensor), order) for n, tensor in zip(norms, ragged, strict=True)]


@rule("_foreach_max")
def foreach_max(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """The largest element of each tensor."""
    return [tensor.max() for tensor in cast(list[torch.Tensor], args[0])]


@rule("equal")
def equal(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Whether all elements agree, on all ranks."""
    a, b = cast(torch.Tensor, args[0]), cast(torch.Tensor, args[1])
    if a.shape != b.shape:
        return False
    ragged, other = (a, b) if isinstance(a, cls) else (b, a)
    assert isinstance(ragged, DTensor)
    spec, local = spec_of(ragged), local_of(ragged)
    same = torch.equal(local, aligned(func, cls, other, spec).expand_as(local))
    verdict = torch.tensor(same, device=local.device)
    for axis in sharded_axes(spec):
        verdict = _across(verdict, "min", spec.mesh, axis)
    return bool(verdict)


@rule("allclose")
def allclose(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """Whether all elements are close, on all ranks."""
    close = torch.isclose(*args, **kwargs)  # type: ignore[arg-type]
    return bool(local_of(reduce(cls, cast(DTensor, close), MIN, [], False)))


@rule("_local_scalar_dense")
def item(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> Number:
    """The value of a one-element tensor, which one rank of the ragged axis holds."""
    return local_of(reduce(cls, cast(DTensor, args[0]), MAX, [], False)).item()


@rule("_amp_foreach_non_finite_check_and_unscale_")
def unscale(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Unscale gradients and agree on found_inf: one rank must not skip a step that the others take."""
    gradients, found_inf = cast(list[torch.Tensor], args[0]), cast(torch.Tensor, args[1])
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    local_gradients = [local_of(g) if isinstance(g, DTensor) else g for g in gradients]
    func(local_gradients, found_inf, *args[2:], **kwargs)
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in sharded):
        for axis in range(mesh.ndim):
            found_inf.copy_(_torch.all_reduce(found_inf, "max", mesh, axis))


def _dims(func: OpOverload, named: dict[str, object], tensor: torch.Tensor) -> list[int]:
    """The dims an operator reduces, counted from the front; none means all."""
    dim = named.get("dim")
    dims = [] if dim is None else [dim] if isinstance(dim, int) else cast(Sequence[int], dim)
    dims = dims_from_front(func, dims, tensor.ndim)
    return dims if tensor.ndim else []


def _check_floating(func: OpOverload, tensor: torch.Tensor) -> None:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise RuntimeError(f"{func}: expected a floating-point or complex tensor, got {tensor.dtype}.")


def _check_some(func: OpOverload, tensor: DTensor, dims: Sequence[int]) -> None:
    """Refuse the extreme of no elements, which torch has no value for either."""
    if not _count(tensor, dims):
        where = f"along dims {list(dims)} of" if dims else "in"
        error = IndexError if dims else RuntimeError
        raise error(f"{func}: expected elements {where} a tensor of shape {tuple(tensor.shape)}, got none.")


def _accumulator(tensor: DTensor, dtype: torch.dtype | None) -> tuple[DTensor, torch.dtype | None]:
    """The tensor in the dtype to accumulate in, and the dtype to round the result to (None: as it comes)."""
    wanted = tensor.dtype if dtype is None else dtype
    if wanted in (torch.float16, torch.bfloat16):
        return cast(DTensor, tensor.to(torch.float32)), wanted
    return (tensor if dtype is None else cast(DTensor, tensor.to(dtype))), None


def _count(tensor: DTensor, dims: Sequence[int]) -> int:
    """Elements that go into one result."""
    return math.prod(tensor.shape[dim] for dim in dims or range(tensor.ndim))


def _mean(cls: type[DTensor], tensor: DTensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    return reduce(cls, tensor, SUM, dims, keepdim) / _count(tensor, dims)


def _is_power(order: float) -> bool:
    """Whether the norm is a root of a sum of powers that an empty shard adds nothing to."""
    return 0 < order < math.inf


def _pending_norm(local_norm: torch.Tensor, spec: DTensorSpec, order: float) -> DTensor:
    """A stock DTensor of no dims whose ranks hold their own part's norm."""
    partial = _torch.norm_partial(order)
    placements = tuple(p if isinstance(p, Replicate) else partial for p in spec.placements)
    result_spec = spec_with(spec, local_norm.dtype, (), placements)
    return new_dtensor(DTensor, local_norm, result_spec, requires_grad=False)


def _dim_norm(
    cls: type[DTensor], magnitudes: DTensor, order: float, dims: Sequence[int], keepdim: bool
) -> torch.Tensor:
    """The norm of non-negative elements over `dims`."""
    if order == math.inf:
        return reduce(cls, magnitudes, MAX, dims, keepdim)
    if order == -math.inf:
        return reduce(cls, magnitudes, MIN, dims, keepdim)
    if order == 0:
        return reduce(cls, cast(DTensor, (magnitudes != 0).to(magnitudes.dtype)), SUM, dims, keepdim)
    if order == 2:
        return reduce(cls, cast(DTensor, magnitudes * magnitudes), SUM, dims, keepdim).sqrt()
    return reduce(cls, cast(DTensor, magnitudes**order), SUM, dims, keepdim) ** (1 / order)
