"""From parameter specs to buckets: who travels together, where the planner puts them, on which routes.

Level 12 of the data flow. Parameters that share groups, layout, dtype and device make one bucket; ragged ones
are planned once, when the unit is made, and stay where they are whatever is cast or frozen later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardkit._torch import spec_of
from shardkit.boxes import local_shape
from shardkit.bucket import Bucket
from shardkit.collectives import new_route
from shardkit.extension import has_extension
from shardkit.extension_gather import ExtensionGather
from shardkit.gather import RowGather
from shardkit.layout import (
    ALIGN,
    BucketSpec,
    Layout,
    RaggedParam,
    RaggedSource,
    ShardedShape,
    interleaved_layout,
    ragged_layout,
)
from shardkit.mesh import DataAxes
from shardkit.params import ParamSpec
from shardkit.placement import Blocks, RaggedShard, block_numel
from shardkit.plan import BucketPlan, TensorSpec, plan_buckets
from shardkit.precision import compute_dtype, reduce_dtype
from shardkit.sharded_param import ShardedParam
from shardkit.sharding import sharding_of
from shardkit.specs import layout_of


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """What `fully_shard` was told about dtypes and devices, for good."""

    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    device: torch.device

    @property
    def offloads(self) -> bool:
        """Whether shards rest on the CPU."""
        return isinstance(self.offload, CPUOffloadPolicy)

    @property
    def pins(self) -> bool:
        """Whether offloaded shards are in pinned memory."""
        offload = self.offload
        return isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and self.device.type != "cpu"


def shard_params(specs: Sequence[ParamSpec]) -> list[ShardedParam]:
    """Plan the ragged parameters, and cut every parameter to this rank's part.

    Raises:
        PaddingError: required blocks waste more than the planner's budget.
    """
    placed = _plan_ragged([spec for spec in specs if isinstance(spec.wish, Blocks)])
    params = []
    for spec in specs:
        plan, placement = placed.get(spec.name) or (None, spec.wish)
        assert isinstance(placement, (Shard, RaggedShard))
        params.append(ShardedParam(spec, sharding_of(spec, placement), _cut(spec, placement, plan), plan))
    return params


def make_buckets(
    params: Sequence[ShardedParam], policy: UnitPolicy, before: Sequence[Bucket] = ()
) -> list[Bucket]:
    """One bucket for all parameters that can share a collective, communicating as those `before` it did."""
    together: dict[object, list[ShardedParam]] = {}
    for param in params:
        axes, local = param.axes, param.local
        where = (id(axes.shard_group), id(axes.replicate_group), id(param.plan))
        together.setdefault((where, local.dtype, local.device, param.is_extended), []).append(param)
    buckets = [_make_bucket(group, policy) for group in together.values()]
    for bucket in buckets:
        for old in before:
            if old.spec.axes is bucket.spec.axes:
                bucket.gather.comm, bucket.grads.comm = old.gather.comm, old.grads.comm
                bucket.gather.small_group, bucket.grads.route = old.gather.small_group, old.grads.route
    return buckets


def check_devices(name: str, params: Sequence[ShardedParam], policy: UnitPolicy) -> None:
    """Everything is where a gather can read it.

    Raises:
        RuntimeError: parameters are on meta, or are to be offloaded and not on the CPU.
    """
    on_meta = [param.name for param in params if param.local.is_meta]
    if on_meta:
        raise RuntimeError(
            f"{name}: parameters are still on the meta device: {on_meta}. Call materialize_(model), "
            "or to_empty(device=...) and initialise them, or load a checkpoint with assign=True, before the "
            "first forward."
        )
    elsewhere = [param.name for param in params if policy.offloads and param.local.device.type != "cpu"]
    if elsewhere:
        raise RuntimeError(
            f"{name}: with CPUOffloadPolicy parameters rest on the CPU, but {elsewhere} do not. Call "
            "to_empty(device='cpu'), or load a state dict that is on the CPU."
        )


def _plan_ragged(specs: Sequence[ParamSpec]) -> dict[str, tuple[BucketPlan, RaggedShard]]:
    """Where every ragged parameter lies, by name; frozen ones travel apart, as they are never reduced."""
    groups: dict[object, list[ParamSpec]] = {}
    for spec in specs:
        key = (
            id(spec.axes.shard_group),
            id(spec.axes.replicate_group),
            spec.param.requires_grad,
            spec.param.dtype,
        )
        groups.setdefault(key, []).append(spec)
    placed = {}
    for group in groups.values():
        placed.update(_plan_group(group))
    return placed


def _plan_group(specs: Sequence[ParamSpec]) -> dict[str, tuple[BucketPlan, RaggedShard]]:
    """The plan and the placement of parameters that may share a bucket.

    Where tensor parallelism divides unevenly, its ranks plan tensors of other shapes and get other cuts. Each
    plans for all of them: so all cut along the same dims, as one tensor has to be, refuse blocks that do not
    fit on one of them, and make one bucket each, in which TP's own collectives come in one order.
    """
    own = tuple([tuple(spec.local.shape) for spec in specs])
    everywhere = _shapes_on_all_ranks(specs)
    max_buckets = 2 if len(everywhere) == 1 else 1
    plans: dict[str, BucketPlan] = {}
    num_dims = dict.fromkeys([spec.name for spec in specs], 0)
    for shapes in everywhere:
        for plan in plan_buckets(
            [_tensor_spec(spec, shape) for spec, shape in zip(specs, shapes, strict=True)],
            specs[0].axes.shard_size,
            unit_numel=ALIGN,
            align_numel=ALIGN,
            max_buckets=max_buckets,
        ):
            for spec, shape in zip(specs, shapes, strict=True):
                if spec.name in plan.starts:
                    num_dims[spec.name] = len(_placement_in(plan, spec.name, shape, num_dims[spec.name]).dims)
            if shapes == own:
                plans.update(dict.fromkeys(plan.starts, plan))
    return {
        spec.name: (plans[spec.name], _placement_in(plans[spec.name], spec.name, shape, num_dims[spec.name]))
        for spec, shape in zip(specs, own, strict=True)
    }


Shapes = tuple[tuple[int, ...], ...]


def _shapes_on_all_ranks(specs: Sequence[ParamSpec]) -> list[Shapes]:
    """The different shapes that these parameters have on tensor-parallel ranks, in an order all ranks share.

    Of parameters on several meshes every pair of coordinates counts, whether a rank has them or not.
    """
    by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for index, spec in enumerate(specs):
        mesh = spec.param.device_mesh if isinstance(spec.param, DTensor) else None
        by_mesh.setdefault(mesh, []).append(index)
    choices = []
    for mesh, indices in by_mesh.items():
        coordinates = [()] if mesh is None else product(*map(range, mesh.shape))
        shapes = [[_shape_at(specs[index], coordinate) for index in indices] for coordinate in coordinates]
        choices.append(dict.fromkeys(tuple(zip(indices, at, strict=True)) for at in shapes))
    return [
        tuple([shape for _, shape in sorted(chain.from_iterable(picked))]) for picked in product(*choices)
    ]


def _shape_at(spec: ParamSpec, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what data parallelism divides on the tensor-parallel rank at `coordinate`."""
    param = spec.param
    return local_shape(layout_of(spec_of(param)), coordinate) if isinstance(param, DTensor) else param.shape


def _tensor_spec(spec: ParamSpec, shape: tuple[int, ...]) -> TensorSpec:
    assert isinstance(spec.wish, Blocks)
    block = block_numel(spec.wish, shape)
    return TensorSpec(
        name=spec.name,
        numel=math.prod(shape),
        block_numel=block.block_numel,
        period_numel=block.period_numel,
        row_numel=min(block.block_numel, block_numel(Blocks(), shape).block_numel),  # 1 where cut anywhere
        required=spec.wish.required,
    )


def _placement_in(plan: BucketPlan, name: str, shape: tuple[int, ...], min_dims: int) -> RaggedShard:
    return RaggedShard.from_numels(shape, plan.local_numels(name), plan.blocks[name], min_dims=min_dims)


def _cut(spec: ParamSpec, placement: Shard | RaggedShard, plan: BucketPlan | None) -> Tensor:
    """This rank's part of the parameter that the user passed."""
    full, rank = spec.local, spec.axes.shard_rank
    if has_extension(spec.name, full):
        return _cut_extended(spec, placement)
    if isinstance(placement, RaggedShard):
        assert plan is not None
        piece = plan.local_range(spec.name, rank)
        flat = full.reshape(-1)[piece.start_in_tensor :][: piece.numel]
        return flat.view(placement.local_shape(tuple(full.shape), rank))
    chunk = -(-full.shape[placement.dim] // spec.axes.shard_size)  # as torch.chunk cuts
    start = min(rank * chunk, full.shape[placement.dim])
    return full.narrow(placement.dim, start, min(chunk, full.shape[placement.dim] - start))


def _cut_extended(spec: ParamSpec, placement: Shard | RaggedShard) -> Tensor:
    """A part with bytes of its own, so that the user's whole tensor can go.

    By `chunk`, `new_zeros` and `copy_`, as torch cuts, because subclasses implement the ops that they have
    met.
    """
    full, rank = spec.local, spec.axes.shard_rank
    if isinstance(placement, RaggedShard):
        if len(placement.dims) > 1:
            raise NotImplementedError(
                f"param {spec.name!r}: a {type(full).__name__} can only be cut between rows of its dim 0, "
                f"and {placement} cuts inside. Wish for whole rows, as Blocks()."
            )
        piece = full.narrow(0, placement.start_unit(rank), placement.local_units[rank])
    else:
        chunks = torch.chunk(full, spec.axes.shard_size, placement.dim)
        piece = chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    local = full.new_zeros(piece.shape)
    if piece.numel():
        local.copy_(piece)
    return local


def _make_bucket(params: list[ShardedParam], policy: UnitPolicy) -> Bucket:
    axes, local = params[0].axes, params[0].local
    spec = BucketSpec(
        layout=_layout_of(params, axes),
        axes=axes,
        dtype=local.dtype,
        compute_dtype=compute_dtype(local.dtype, policy.precision),
        reduce_dtype=reduce_dtype(local.dtype, policy.precision),
        device=policy.device,
        shard_device=torch.device("cpu") if policy.offloads and not local.is_meta else local.device,
        pin_memory=policy.pins and not local.is_meta,
        is_extended=params[0].is_extended,
    )
    shard_route = None if axes.shard_group is None else new_route(axes.shard_group, policy.device)
    replicate_route = None if axes.replicate_group is None else new_route(axes.replicate_group, policy.device)
    gather = (
        ExtensionGather(params, spec, shard_route, policy.precision)
        if spec.is_extended
        else RowGather(params, spec, shard_route)
    )
    return Bucket(params, spec, gather, replicate_route)


def _layout_of(params: list[ShardedParam], axes: DataAxes) -> Layout:
    plan = params[0].plan
    if plan is None:
        shapes = [ShardedShape(param.name, param.shape, param.shard_dim) for param in params]
        return interleaved_layout(shapes, axes.shard_size, axes.shard_rank)
    pieces = tuple(RaggedParam(param.plan_name, param.shape, tuple(param.local.shape)) for param in params)
    return ragged_layout(RaggedSource(plan, pieces), axes.shard_rank, range(len(pieces)))
