"""What an elementwise operator does to the local tensors of RaggedTensors, and which rule an operator has.

Level 6 of the data flow, below `ragged.py`, which calls `RULES` for every operator. A rule gets the class to
build, the operator and its arguments. Whether operands match is decided on global shapes and layouts, never
on local ones: a rank that holds one row would broadcast it silently. An operand may be

    a RaggedTensor in the same layout         its local tensor
    a RaggedTensor (8, 1) against (8, 3)      its local tensor, if the rows lie alike
    a DTensor, replicated or pending          the part of it that this rank's elements meet
    a plain tensor of no dims, or a number    as it is

and anything else raises. So does an operator without a rule: no answer rather than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NoReturn, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardkit._torch import (
    DTensorSpec,
    OpOverload,
    local_of,
    meta_of,
    new_dtensor,
    op_arguments,
    op_name,
    spec_of,
)
from shardkit.boxes import Layout, local_part
from shardkit.exchange import transfer
from shardkit.placement import RaggedShard
from shardkit.specs import coordinate_of, layout_of, same_layout, sharded_axes, spec_with

Args = tuple[object, ...]
Kwargs = Mapping[str, object]
Rule = Callable[[type[DTensor], OpOverload, Args, Kwargs], object]

LIST_OPERATORS = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp "
    "expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt "
    "sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)

RULES: dict[OpOverload, Rule] = {}  # filled by `find_rule` as operators are met
NAMED_RULES: dict[str, Rule] = {}  # operator name without overload -> rule; filled by the `rule` decorator


def rule(names: str) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule of the operators named in `names`."""

    def register(function: Rule) -> Rule:
        NAMED_RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def find_rule(func: OpOverload) -> Rule:
    """The rule of an operator met for the first time; without one, the rule that decomposes or refuses."""
    # torch tags `equal` and the random `rrelu` pointwise too; the first has a rule of its own
    is_pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    found = NAMED_RULES.get(base_name(func)) or (pointwise if is_pointwise else _unknown)
    if found not in (pointwise, _unknown) and any(argument.is_out for argument in op_arguments(func)):
        found = _no_out
    return RULES.setdefault(func, found)


def base_name(func: OpOverload) -> str:
    """`add_` for aten::add_.Tensor."""
    return op_name(func).partition("::")[2]


def refuse(func: OpOverload, why: str) -> NoReturn:
    """Raise for a call that this layout cannot answer exactly."""
    raise NotImplementedError(f"{func}: {why}")


def dims_from_front(func: OpOverload, dims: Sequence[int], ndim: int) -> list[int]:
    """The dims of a tensor of `ndim` that a call names, counted from the front; raises as torch does."""
    end = max(1, ndim)
    for dim in dims:
        if not -end <= dim < end:
            raise IndexError(f"{func}: expected dims from {-end} to {end - 1}, got {dim}.")
    counted = [dim % end for dim in dims]
    if len(set(counted)) < len(counted):
        raise RuntimeError(f"{func}: expected every dim once, got {tuple(dims)} of {ndim} dims.")
    return counted


def _no_out(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> NoReturn:
    """A result that lies otherwise than its operands is a new tensor; `out` would keep what it held."""
    refuse(func, "no out= here on a RaggedTensor. Call it without, and copy_() the result.")


def _unknown(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """An operator that torch itself writes in terms of others is as right as those are; else refuse."""
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        refuse(
            func,
            "no exact rule on a RaggedTensor. Gather it first with full_tensor(), work on to_local(), or go "
            "to another layout with shardkit.redistribute.",
        )
    return result


# elementwise as well, or made for a shape alone, but not tagged so by torch
@rule(
    "alias detach clone copy_ _to_copy fill fill_ zero zero_ masked_fill masked_fill_ zeros_like ones_like "
    "empty_like full_like _pin_memory is_pinned lift_fresh"
)
def pointwise(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run an elementwise operator on the local tensors."""
    spec: DTensorSpec | None = None
    local_args: list[object] = []
    for arg in args:
        if type(arg) is cls:
            own = spec_of(arg)
            if spec is None:
                spec = own
            elif own is not spec and not same_layout(own, spec):
                return _pointwise_aligned(cls, func, args, kwargs)
            local_args.append(local_of(arg))
        elif isinstance(arg, torch.Tensor):
            return _pointwise_aligned(cls, func, args, kwargs)
        else:
            local_args.append(arg)
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}  # units in row-major order, always
    if spec is None or (kwargs and any(isinstance(value, torch.Tensor) for value in kwargs.values())):
        return _pointwise_aligned(cls, func, args, kwargs)
    result = func(*local_args, **kwargs)
    return args[0] if _written(func) else wrap(cls, result, spec)


def _pointwise_aligned(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run an elementwise operator whose operands do not all lie alike."""
    named = named_arguments(func, args, kwargs)
    tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    written = [named[name] for name in _written(func)]
    if any(not isinstance(out, cls) for out in written):
        refuse(func, "writes a tensor that is not ragged. Redistribute its ragged operands.")
    candidates = [spec_of(t) for t in (written or tensors) if isinstance(t, cls) and t.shape == shape]
    if not candidates:
        refuse(func, f"no ragged operand to hold a result of shape {tuple(shape)}. Expand one to it.")
    spec = max(candidates, key=lambda candidate: len(sharded_axes(candidate)))  # the others can be cut to it
    for out in written:
        if not same_layout(spec_of(cast(DTensor, out)), spec):
            refuse(func, "writes tensors that lie differently. Give them one layout.")

    def to_local(value: object) -> object:
        return aligned(func, cls, value, spec) if isinstance(value, torch.Tensor) else value

    result = func(*map(to_local, args), **{name: to_local(value) for name, value in kwargs.items()})
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return wrap(cls, result, spec)


def aligned(func: OpOverload, cls: type[DTensor], operand: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """What this rank's elements of a tensor in `spec` meet in `operand`, broadcastable to them."""
    if not isinstance(operand, DTensor):
        if operand.ndim:
            refuse(
                func,
                f"a plain tensor of shape {tuple(operand.shape)} next to a RaggedTensor. If all ranks hold "
                "the same values, wrap it with DTensor.from_local(tensor, mesh, [Replicate()]).",
            )
        return _of_one(func, operand, spec)
    own = spec_of(operand)
    if isinstance(operand, cls):
        if _broadcasts_locally(own, spec):
            return local_of(operand)
        if _holds_all(own, spec):
            return transfer(local_of(operand), layout_of(own), layout_of(spec), spec.mesh).wait()
    elif own.mesh == spec.mesh and (part := _stock_part(operand, spec)) is not None:
        return part if part.ndim else _of_one(func, part, spec)
    refuse(
        func,
        f"operands lie differently: {own.placements} and {spec.placements} for shape "
        f"{tuple(meta_of(spec).shape)}. Bring one to the other's placements with shardkit.redistribute.",
    )


def _of_one(func: OpOverload, operand: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """An operand of no dims: next to one that has none either, it takes part in the promotion of dtypes."""
    fills = base_name(func).startswith(("fill", "masked_fill"))
    return operand if meta_of(spec).shape or fills else operand.reshape(1)


def _broadcasts_locally(small: DTensorSpec, large: DTensorSpec) -> bool:
    """Whether local tensors broadcast exactly as global ones do: same rows, dims of size 1 behind."""
    if same_layout(small, large):
        return True
    a, b = meta_of(small).shape, meta_of(large).shape
    if small.mesh != large.mesh or len(a) != len(b):
        return False
    for p, q in zip(small.placements, large.placements, strict=True):
        if isinstance(q, RaggedShard):
            alike = q.same_layout(p) and a[: len(q.dims)] == b[: len(q.dims)]
        elif isinstance(q, Shard):
            alike = (p == q and a[q.dim] == b[q.dim]) or (isinstance(p, Replicate) and a[q.dim] == 1)
        else:
            alike = p == q
        if not alike:
            return False
    return True


def _holds_all(own: DTensorSpec, spec: DTensorSpec) -> bool:
    """Whether every rank has all its elements of `spec`, in other units or with a cut still to make."""
    shape = meta_of(own).shape
    if own.mesh != spec.mesh or shape != meta_of(spec).shape:
        return False
    pairs = list(zip(own.placements, spec.placements, strict=True))
    nothing_else_cut = all(isinstance(p, RaggedShard | Replicate) for p in own.placements + spec.placements)
    for p, q in pairs:
        if isinstance(q, RaggedShard):
            in_other_units = isinstance(p, RaggedShard) and p.local_numels(shape) == q.local_numels(shape)
            holds = q.same_layout(p) or (nothing_else_cut and in_other_units)
        else:
            holds = p == q or isinstance(p, Replicate)
        if not holds:
            return False
    return True


def _stock_part(operand: DTensor, spec: DTensorSpec) -> torch.Tensor | None:
    """The part of a stock DTensor that this rank's elements meet, None if getting it would need a gather.

    It must replicate where the ragged axis cuts; on a tensor-parallel axis it may be cut alike. A pending
    reduction is done first.
    """
    own, shape = spec_of(operand), meta_of(spec).shape
    lead = len(shape) - operand.ndim
    alike = [
        isinstance(p, Shard) and q == Shard(p.dim + lead) and operand.shape[p.dim] == shape[p.dim + lead]
        for p, q in zip(own.placements, spec.placements, strict=True)
    ]
    if not all(ok or isinstance(p, Replicate | Partial) for ok, p in zip(alike, own.placements, strict=True)):
        return None
    reduced = [p if ok else Replicate() for ok, p in zip(alike, own.placements, strict=True)]
    local = local_of(operand.redistribute(placements=reduced))
    if not local.ndim:
        return local
    seen = list(shape)  # with the cuts that `local` has already
    for ok, placement in zip(alike, own.placements, strict=True):
        if ok and isinstance(placement, Shard):
            seen[placement.dim + lead] = local.shape[placement.dim]
    others = tuple(Replicate() if ok else q for ok, q in zip(alike, spec.placements, strict=True))
    rest = Layout(tuple(seen), tuple(spec.mesh.shape), others)
    return local_part(local.expand(seen), rest, coordinate_of(spec.mesh))


@rule("index_put_")
def masked_write(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """`tensor[mask] = value` with a mask of the same layout and one value."""
    tensor, indices, value = args[:3]
    mask = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    one_value = isinstance(value, torch.Tensor) and value.ndim == 0 and not args[3:]
    if not (isinstance(tensor, cls) and isinstance(mask, cls) and mask.dtype == torch.bool and one_value):
        refuse(func, "only tensor[mask] = value with a ragged mask and one value. Use to_local().")
    assert isinstance(value, torch.Tensor)
    spec = spec_of(tensor)
    local_of(tensor)[aligned(func, cls, mask, spec)] = aligned(func, cls, value, spec)
    return tensor


@rule(" ".join(f"_foreach_{name} _foreach_{name}_" for name in LIST_OPERATORS.split()))
@rule("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")
def foreach(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run an elementwise operator over lists of tensors; lists may mix RaggedTensors with stock DTensors.

    The way through for lists that lie alike, the optimizers' case, compares specs by identity in C.
    """
    tensors = args[0]
    if type(tensors) is not list or set(map(type, tensors)) != {cls}:
        return _foreach_apart(cls, func, args, kwargs)
    specs = list(map(spec_of, tensors))
    local_args: list[object] = []
    for arg in args:
        if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor):
            types = set(map(type, arg))
            if types == {cls} and list(map(spec_of, arg)) == specs:
                arg = list(map(local_of, arg))
            elif types != {torch.Tensor} or any(tensor.ndim for tensor in arg):
                return _foreach_apart(cls, func, args, kwargs)
        elif isinstance(arg, DTensor):
            return _foreach_apart(cls, func, args, kwargs)
        local_args.append(arg)
    results = func(*local_args, **{name: _replicated_scalar(func, value) for name, value in kwargs.items()})
    return results and [wrap(cls, r, spec) for r, spec in zip(results, specs, strict=True)]


def _foreach_apart(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Split lists into plain tensors, stock DTensors and ragged ones, whose operands are then aligned."""
    tensors = args[0]
    if not isinstance(tensors, Sequence):
        refuse(func, "expected a list of tensors first.")
    by_kind: dict[type[torch.Tensor], list[int]] = {}
    for index, tensor in enumerate(tensors):
        stock = DTensor if isinstance(tensor, DTensor) else torch.Tensor
        kind = cls if isinstance(tensor, cls) else stock
        by_kind.setdefault(kind, []).append(index)

    results: dict[int, object] = {}
    for kind, indices in by_kind.items():
        picked = tuple(
            [arg[index] for index in indices]
            if isinstance(arg, list | tuple) and len(arg) == len(tensors)
            else arg
            for arg in args
        )
        done = _foreach_ragged(cls, func, picked, kwargs) if kind is cls else func(*picked, **kwargs)
        results.update(zip(indices, done or (), strict=False))
    return [results[index] for index in range(len(tensors))] if results else None


def _foreach_ragged(cls: type[DTensor], func: OpOverload, args: Args, kwargs: Kwargs) -> list[object] | None:
    """Run a list operator whose first list is ragged and whose other operands need aligning."""
    assert isinstance(args[0], list)
    specs = [spec_of(tensor) for tensor in args[0]]
    named = named_arguments(func, args, kwargs)
    for name in _written(func):
        for out, spec in zip(cast(list[DTensor], named[name]), specs, strict=False):
            if not isinstance(out, cls) or not same_layout(spec_of(out), spec):
                refuse(func, f"writes {name} that lie otherwise than their tensor. Redistribute them.")

    def to_local(arg: object) -> object:
        if not isinstance(arg, list):
            return _replicated_scalar(func, arg)
        return [
            aligned(func, cls, value, spec) if isinstance(value, torch.Tensor) else value
            for value, spec in zip(arg, specs, strict=False)
        ]

    results = func(*map(to_local, args), **{name: _replicated_scalar(func, v) for name, v in kwargs.items()})
    return results and [wrap(cls, result, spec) for result, spec in zip(results, specs, strict=True)]


def _replicated_scalar(func: OpOverload, value: object) -> object:
    """A DTensor given for all tensors of a list (a clipping factor, a learning rate) as a plain tensor."""
    if not isinstance(value, DTensor):
        return value
    if value.numel() != 1:
        refuse(func, f"a DTensor of shape {tuple(value.shape)} for a whole list, expected one element.")
    return value.full_tensor()


def wrap(cls: type[DTensor], result: object, spec: DTensorSpec) -> object:
    """Results of an operator on local tensors, as tensors in the layout `spec`."""
    if isinstance(result, torch.Tensor):
        same = result.dtype == meta_of(spec).dtype
        return new_dtensor(cls, result, spec if same else spec_with(spec, result.dtype), requires_grad=False)
    if isinstance(result, tuple | list):
        return type(result)(wrap(cls, item, spec) for item in result)
    return result


def named_arguments(func: OpOverload, args: Args, kwargs: Kwargs) -> dict[str, object]:
    """All arguments of a call by name, defaults included."""
    arguments = op_arguments(func)
    named: dict[str, object] = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return named | {a.name: value for a, value in zip(arguments, args, strict=False)} | dict(kwargs)


@cache
def _written(func: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that an operator writes."""
    return tuple(
        argument.name
        for argument in op_arguments(func)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
