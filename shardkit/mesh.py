"""Meshes: which ranks shard a parameter together, and which hold copies of it.

Level 1 of the data flow, and the only reader of DeviceMesh in the runtime: everything later works with
a `DataAxes`, that is with sizes, ranks and process groups. Takes a mesh as a user builds it (1-D, 2-D, or N-D
with `DataParallelMeshDims`), or builds one with `build_mesh`. A sharding strategy is the shape of the mesh:

    mesh["shard"]                 every parameter cut over all ranks of the axis         (FSDP, F = shard)
    mesh["replicate", "shard"]    cut over `shard`, copies over `replicate`              (HSDP)
    mesh["replicate", "shard"]    with shard=1: copies only                              (DDP, F = 1)
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from shardkit._torch import (
    DataParallelMeshInfo,
    concatenate_meshes,
    flatten_mesh,
    roles_of_mesh_info,
)

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


_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def build_mesh(
    device_type: str,
    *,
    tp: int = 1,
    replicate: int = 1,
    shard: int = -1,
    pp: int = 1,
    node_size: int | None = None,
) -> DeviceMesh:
    """A mesh of the axes (pp, replicate, shard, tp), the busiest innermost, over all ranks.

    Ranks of one node are neighbours, so the innermost axis gets the fastest links: tp talks in every layer,
    shard thrice a unit, replicate once a unit with 1/shard of the bytes, pp between stages. Sixteen ranks on
    two nodes of eight, `build_mesh("cuda", tp=2, replicate=2)`:

        node        0                       1
        rank        0 1 2 3 4 5 6 7         8 9 10 11 12 13 14 15
        replicate   0 0 0 0 0 0 0 0         1 1 1  1  1  1  1  1
        shard       0 0 1 1 2 2 3 3         0 0 1  1  2  2  3  3
        tp          0 1 0 1 0 1 0 1         0 1 0  1  0  1  0  1

    An axis of size 1 keeps its name, so `mesh["shard"]` (FSDP) and `mesh["replicate", "shard"]` (HSDP) always
    work. Collective over the world: all ranks must call.

    Args:
        device_type: "cuda", "cpu", ...
        tp, replicate, shard, pp: ranks along each axis; at most one may be -1, meaning all that remain.
        node_size: ranks that share the fast domain. Default: the launcher's LOCAL_WORLD_SIZE, else the world.
    Raises:
        ValueError: the sizes do not multiply to the world size, or a tp group would leave its node.
        ValueError: there is no process group and no launcher to make one.
    """
    _init_default_group()
    world_size = dist.get_world_size()
    sizes = _fill_sizes({"pp": pp, "replicate": replicate, "shard": shard, "tp": tp}, world_size)
    if node_size is None:
        node_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    _check_tp_stays_in_node(sizes["tp"], node_size, world_size)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def default_mesh() -> DeviceMesh:
    """The 1-D mesh over all ranks, on the accelerator, else the CPU.

    Collective over the world where the default process group does not exist yet: all ranks must call.

    Raises:
        ValueError: there is no process group and no launcher to make one.
    """
    _init_default_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank keeps its part of what lives on `mesh`."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


@dataclass(frozen=True, slots=True)
class DataAxes:
    """This rank's place in the data-parallel part of a mesh.

    An axis that the mesh lacks has size 1, rank 0 and no group: nothing is ever sent over an axis of size 1.
    """

    mesh: DeviceMesh  # (shard,), (replicate, shard) or (replicate,)
    shard_group: dist.ProcessGroup | None
    shard_size: int
    shard_rank: int
    replicate_group: dist.ProcessGroup | None
    replicate_size: int
    replicate_rank: int
    spmd_mesh: DeviceMesh | None = None  # with dp_mesh_dims: the whole mesh, on which the parameters live
    spmd_dims: DataParallelMeshDims | None = None

    @property
    def size(self) -> int:
        """Ranks that see different batches: what a mean gradient is divided by."""
        return self.shard_size * self.replicate_size

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis by itself."""
        names = self.mesh.mesh_dim_names
        return self.mesh if names is None or self.mesh.ndim == 1 else self.mesh[names[-1]]

    def placements(self, sharded: Placement) -> tuple[Placement, ...]:
        """The placements on `mesh` of a parameter that lies as `sharded` on the shard axis."""
        replicated = () if self.replicate_group is None else (Replicate(),)
        return replicated if self.shard_group is None else (*replicated, sharded)


def data_axes(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> DataAxes:
    """Read the data-parallel axes of a mesh.

    Collective over the world, the first time, where `dp_mesh_dims` gives several names for one role: these
    are flattened into one axis, which needs a new group. Otherwise nothing is sent.

    Args:
        mesh: 1-D (shard) or 2-D with named axes (replicate, shard); any named axes with `dp_mesh_dims`.
        dp_mesh_dims: the names of the axes of `mesh` that shard and that replicate.
    Raises:
        TypeError: `mesh` is no DeviceMesh.
        ValueError: the mesh does not say which axis does what, or this rank is not part of it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a DeviceMesh, got {type(mesh).__name__}. Make one with shardkit.build_mesh or "
            "torch.distributed.init_device_mesh."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh: rank {dist.get_rank()} is not part of {mesh}. Pass every rank a mesh that it belongs "
            "to, or do not shard the module on this rank."
        )
    if dp_mesh_dims is not None:
        return _data_axes_by_name(mesh, dp_mesh_dims)
    if mesh.ndim == 1:
        return _data_axes_by_dim(mesh, shard_dim=0, replicate_dim=None)
    _check_hybrid_mesh(mesh)
    return _data_axes_by_dim(mesh, shard_dim=1, replicate_dim=0)


def axes_of_mesh_info(info: DataParallelMeshInfo) -> DataAxes:
    """What torch's FSDPMeshInfo or HSDPMeshInfo names (users return it in a ShardPlacementResult)."""
    return _data_axes_by_dim(*roles_of_mesh_info(info))


def shard_subgroup(axes: DataAxes, num_ranks: int) -> dist.ProcessGroup:
    """The group of `num_ranks` neighbours on the shard axis to which this rank belongs.

    Collective over these neighbours, the first time for each axis and number: all of them must call. A slice
    of a mesh has other ranks on each rank, so a new DeviceMesh cannot make the group: that is collective over
    the world, with equal arguments everywhere.

    Args:
        axes: with a shard axis.
        num_ranks: a divisor of the shard size.
    """
    assert axes.shard_group is not None and axes.shard_size % num_ranks == 0
    subgroups = _subgroups.setdefault(axes.shard_group, {})
    if num_ranks not in subgroups:
        start = axes.shard_rank // num_ranks * num_ranks
        ranks = dist.get_process_group_ranks(axes.shard_group)[start : start + num_ranks]
        subgroups[num_ranks] = dist.new_group(ranks, use_local_synchronization=True)
    return subgroups[num_ranks]


_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of `outer`'s axes followed by `inner`'s, for example the data-parallel ones and then tp.

    Sends nothing: the groups of both are reused.

    Raises:
        ValueError: an axis has no name, or the two were not sliced from one mesh or overlap.
    """
    if outer.mesh_dim_names is None or inner.mesh_dim_names is None:
        raise ValueError(
            f"mesh: cannot join {outer} and {inner}: an axis has no name. Pass mesh_dim_names to "
            "init_device_mesh, or slice both from one shardkit.build_mesh."
        )
    try:
        return concatenate_meshes((outer, inner))
    except RuntimeError as error:
        raise ValueError(
            f"mesh: cannot join {outer} and {inner}: {error}. Slice both from one mesh, for example "
            "mesh = build_mesh(...), then mesh['shard'] and mesh['tp']."
        ) from error


def _init_default_group() -> None:
    """Make the default group from the launcher's variables, if the program has not made one."""
    if dist.is_initialized():
        return
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"mesh: there is no process group, and {', '.join(missing)} are not set to make one. Start the "
            "program with torchrun, or call torch.distributed.init_process_group first."
        )
    dist.init_process_group()


def _fill_sizes(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """Replace the one -1 by what remains of the world."""
    written = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if any(size != -1 and size < 1 for size in sizes.values()):
        raise ValueError(f"build_mesh: {written}: a size is positive, or -1 for all that remain. Correct it.")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"build_mesh: {written}: more than one size is -1. Give all but one of {open_axes}.")
    product = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and world_size % product == 0:
        return {axis: world_size // product if size == -1 else size for axis, size in sizes.items()}
    if product != world_size:
        fact = f"{product} does not divide" if open_axes else f"the product is {product}, not"
        raise ValueError(
            f"build_mesh: {written}: {fact} the world size {world_size}. Choose sizes that multiply to "
            f"{world_size}, or -1 for one of them."
        )
    return sizes


def _check_tp_stays_in_node(tp: int, node_size: int, world_size: int) -> None:
    if node_size < 1:
        raise ValueError(f"build_mesh: node_size={node_size} is not positive. Pass the ranks of one node.")
    node_size = min(node_size, world_size)
    if node_size % tp:
        start = node_size // tp * tp
        raise ValueError(
            f"build_mesh: tp={tp} does not divide the node size {node_size}: the tp group of ranks {start} "
            f"to {start + tp - 1} would leave the node of ranks 0 to {node_size - 1}. Choose a tp that "
            f"divides {node_size}, or pass node_size where the fast domain is larger than a node."
        )


def _check_hybrid_mesh(mesh: DeviceMesh) -> None:
    """Two named axes; where they bear build_mesh's names, in the order (replicate, shard)."""
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh: expected 1 axis (shard) or 2 (replicate, shard), got {mesh}. Slice it, for example "
            "mesh['replicate', 'shard'], or name the axes with dp_mesh_dims=DataParallelMeshDims(shard=..., "
            "replicate=...)."
        )
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh: the axes of {mesh} have no names, so nothing says that the first one replicates and the "
            "second shards. Pass mesh_dim_names=('replicate', 'shard') to init_device_mesh."
        )
    outer, inner = mesh.mesh_dim_names
    if outer in ("shard", "tp") or inner in ("replicate", "tp", "pp"):
        raise ValueError(
            f"mesh: in a mesh of 2 axes the first replicates and the second shards, got "
            f"({outer!r}, {inner!r}). Pass mesh['replicate', 'shard'] or mesh['shard'], or dp_mesh_dims."
        )


def _data_axes_by_name(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataAxes:
    names = (*dims.replicate_names, *dims.shard_names)
    known = mesh.mesh_dim_names or ()
    for name in names:
        if name not in known:
            raise ValueError(
                f"dp_mesh_dims: axis {name!r} is not one of the mesh's, {known}. Name the axes of the mesh "
                "that you pass to fully_shard."
            )
        if names.count(name) > 1:
            raise ValueError(f"dp_mesh_dims: axis {name!r} is given twice, in {dims}. An axis has one role.")
    axes = [_one_axis(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    return _data_axes_by_dim(
        axes[0] if len(axes) == 1 else concatenate_meshes(axes),
        shard_dim=len(axes) - 1 if dims.shard_names else None,
        replicate_dim=0 if dims.replicate_names else None,
        spmd_mesh=mesh,
        spmd_dims=dims,
    )


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[names], "_".join(names))


def _data_axes_by_dim(
    mesh: DeviceMesh,
    shard_dim: int | None,
    replicate_dim: int | None,
    spmd_mesh: DeviceMesh | None = None,
    spmd_dims: DataParallelMeshDims | None = None,
) -> DataAxes:
    shard_group = None if shard_dim is None else mesh.get_group(shard_dim)
    replicate_group = None if replicate_dim is None else mesh.get_group(replicate_dim)
    return DataAxes(
        mesh=mesh,
        shard_group=shard_group,
        shard_size=1 if shard_group is None else shard_group.size(),
        shard_rank=0 if shard_group is None else shard_group.rank(),
        replicate_group=replicate_group,
        replicate_size=1 if replicate_group is None else replicate_group.size(),
        replicate_rank=0 if replicate_group is None else replicate_group.rank(),
        spmd_mesh=spmd_mesh,
        spmd_dims=spmd_dims,
    )
