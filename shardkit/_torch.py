"""Every private torch API that shardkit touches: one small function each, with the reason.

Level 0 of the data flow. When a torch release moves one of these names, this is the file to change.
Supported: torch >=2.11,<2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo as DataParallelMeshInfo

try:
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims
except ImportError:  # torch 2.11 has none

    @dataclass(frozen=True)
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """The names of the mesh axes that shard and that replicate, as torch's own class from 2.12 on."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError(
                    "DataParallelMeshDims: neither shard nor replicate is given. Name an axis for one."
                )

        @property
        def shard_names(self) -> tuple[str, ...]:
            return _as_names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            return _as_names(self.replicate)

    def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
        return () if names is None else (names,) if isinstance(names, str) else tuple(names)


# ---------------------------------------------------------------- meshes


class MeshRoles(NamedTuple):
    """Which dim of a mesh shards and which replicates; None where the mesh has no such dim."""

    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis out of several. No public call does it; torch caches the result, and its group, by name."""
    return mesh._flatten(name)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Slices of one mesh side by side, with their groups: slicing needs the root mesh, which torch hides."""
    return DeviceMesh._concatenate(list(meshes))


def roles_of_mesh_info(info: DataParallelMeshInfo) -> MeshRoles:
    """What torch's mesh infos say; users return them in a ShardPlacementResult, public only by its docs."""
    return MeshRoles(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim)


# ---------------------------------------------------------------- lists of tensors


def foreach_norm(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """All norms in one call, accumulated in `dtype`; the public get_total_norm has only the tensors' own."""
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """All products in one call; the public clip_grads_with_norm_ takes DTensors only with a DTensor norm."""
    torch._foreach_mul_(list(tensors), factor)
