"""The DTensor that a sharded parameter is: mesh, placements and global shape, tensor parallelism included.

Level 3 of the data flow: pure but for meshes. Takes a `ParamSpec` and where the planner put it; gives the
specs of the sharded and of the unsharded tensor, and the way of a gradient from the one that autograd made to
them.

    plain parameter, HSDP             (Replicate, Shard(0))               on (replicate, shard)
    TP cut dim 1                      (Shard(0), Shard(1))                on (shard, tp)
    TP cut dim 0, FSDP cuts it too    (_StridedShard(0), Shard(0))        on (shard, tp)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardkit._torch import (
    DTensorSpec,
    cuts_dim,
    local_of,
    make_spec,
    make_strided_shard,
    new_dtensor,
    spec_of,
    wait_async,
    with_dtype,
)
from shardkit.mesh import join_meshes
from shardkit.params import ParamSpec
from shardkit.placement import RaggedShard, contiguous_stride
from shardkit.ragged import RaggedTensor, require_own_dispatch


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one parameter looks at rest (`sharded`) and gathered (`unsharded`: None for a plain tensor)."""

    sharded: DTensorSpec
    unsharded: DTensorSpec | None
    free_dims: tuple[int, ...]  # mesh dims of `unsharded` that data parallelism reduces itself
    kind: type[DTensor]  # RaggedTensor where a placement is ragged

    def wrap_sharded(self, local: Tensor) -> DTensor:
        """The DTensor whose local part is `local` itself."""
        return new_dtensor(self.kind, local, self.sharded, requires_grad=False)

    def wrap_unsharded(self, local: Tensor) -> Tensor:
        """What the module computes with: `local`, or the tensor-parallel DTensor around it."""
        if self.unsharded is None:
            return local
        return new_dtensor(DTensor, local, with_dtype(self.unsharded, local.dtype), requires_grad=False)

    def local_grad(self, grad: Tensor) -> Tensor:
        """The part of a gradient that data parallelism reduces.

        Collective over the tensor-parallel axis where TP left the gradient in another placement.
        """
        if self.unsharded is None:
            return grad
        grad = wait_async(grad)
        assert isinstance(grad, DTensor), "a tensor-parallel parameter has a DTensor gradient"
        wanted = tuple(
            have if dim in self.free_dims else want
            for dim, (have, want) in enumerate(zip(grad.placements, self.unsharded.placements, strict=True))
        )
        return local_of(grad if wanted == tuple(grad.placements) else grad.redistribute(placements=wanted))

    def cast(self, dtype: torch.dtype) -> Sharding:
        """The same places for another dtype."""
        return replace(self, sharded=with_dtype(self.sharded, dtype))


def sharding_of(spec: ParamSpec, placement: Shard | RaggedShard) -> Sharding:
    """The sharding of a parameter whose data-parallel axis lays it out as `placement`."""
    param, axes = spec.param, spec.axes
    if not isinstance(param, DTensor):
        if axes.spmd_mesh is not None:
            raise ValueError(
                f"param {spec.name!r}: with dp_mesh_dims every parameter is a DTensor on the whole mesh, got "
                "a plain tensor. Distribute the module first (distribute_module), or pass a mesh of the "
                "data-parallel axes alone."
            )
        return _make(param, axes.mesh, axes.placements(placement))
    if axes.spmd_mesh is not None:
        return _spmd_sharding(spec, param, placement)
    if param.device_mesh.device_type != axes.mesh.device_type:
        raise ValueError(
            f"param {spec.name!r}: it is a DTensor on a {param.device_mesh.device_type} mesh, and "
            f"fully_shard got a {axes.mesh.device_type} mesh. Use meshes of one device type."
        )
    mesh = join_meshes(axes.mesh, param.device_mesh)
    placements = (*axes.placements(_beside(param, placement)), *param.placements)
    return _make(param, mesh, placements)


def _make(
    param: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], free_dims: tuple[int, ...] = ()
) -> Sharding:
    """The sharding of a contiguous parameter whose global shape and dtype stay."""
    is_ragged = any(isinstance(p, RaggedShard) for p in placements)
    if is_ragged:
        require_own_dispatch(mesh)
    return Sharding(
        sharded=make_spec(mesh, placements, param.shape, contiguous_stride(param.shape), param.dtype),
        unsharded=spec_of(param) if isinstance(param, DTensor) else None,
        free_dims=free_dims,
        kind=RaggedTensor if is_ragged else DTensor,
    )


def _beside(param: DTensor, placement: Shard | RaggedShard, *, after: int = -1) -> Placement:
    """The data-parallel placement, where mesh dims of the parameter behind `after` may cut the same dim."""
    if isinstance(placement, RaggedShard):
        return placement
    num_shards = math.prod(
        param.device_mesh.size(dim)
        for dim, other in enumerate(param.placements)
        if dim > after and cuts_dim(other, placement.dim)
    )
    return make_strided_shard(placement.dim, num_shards) if num_shards > 1 else placement


def _spmd_sharding(spec: ParamSpec, param: DTensor, placement: Shard | RaggedShard) -> Sharding:
    """The parameter lies on the whole mesh, replicated on the data-parallel axes; these are replaced."""
    axes, mesh = spec.axes, param.device_mesh
    assert axes.spmd_mesh is not None and axes.spmd_dims is not None
    if mesh is not axes.spmd_mesh and mesh != axes.spmd_mesh:
        raise ValueError(
            f"param {spec.name!r}: it is a DTensor on {mesh}, and fully_shard got {axes.spmd_mesh}. Pass the "
            "mesh on which the parameters are."
        )
    names = mesh.mesh_dim_names or ()
    roles = (*axes.spmd_dims.replicate_names, *axes.spmd_dims.shard_names)
    free_dims = tuple(names.index(name) for name in roles)
    for dim in free_dims:
        if not param.placements[dim].is_replicate():
            raise ValueError(
                f"param {spec.name!r}: expected Replicate() on the data-parallel axis {names[dim]!r}, got "
                f"{param.placements[dim]}. fully_shard divides it there itself."
            )
    if len(roles) == len(set(roles) & set(axes.mesh.mesh_dim_names or ())):
        placements = list(param.placements)
        for name in axes.spmd_dims.shard_names:
            placements[names.index(name)] = _beside(param, placement, after=names.index(name))
        return _make(param, mesh, tuple(placements), free_dims)
    others = [dim for dim in range(mesh.ndim) if dim not in free_dims]
    joined = axes.mesh  # several names in one role: flattened, so the mesh differs from the parameter's
    for dim in others:
        joined = join_meshes(joined, mesh[names[dim]])
    merged = (*axes.placements(_beside(param, placement)), *(param.placements[dim] for dim in others))
    return _make(param, joined, merged, free_dims)
