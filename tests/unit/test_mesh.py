"""Meshes of up to 1,024 ranks on a fake process group: axis order, roles, and every refusal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardkit.mesh import (
    DataParallelMeshDims,
    axes_of_mesh_info,
    build_mesh,
    data_axes,
    default_mesh,
    device_of,
    join_meshes,
    shard_subgroup,
)

RANK = 21


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A fake world in which this process is rank 21; 1,024 ranks unless the test asks for another size."""
    world_size = getattr(request, "param", 1024)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=world_size)
    yield world_size
    dist.destroy_process_group()


def ranks_of(mesh: DeviceMesh, axis: str) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(axis))


# ---------------------------------------------------------------- build_mesh


def test_axes_lie_busiest_innermost(world: int) -> None:
    mesh = build_mesh("cpu", tp=8, replicate=4, pp=2, node_size=8)
    assert mesh.mesh_dim_names == ("pp", "replicate", "shard", "tp")
    assert mesh.shape == (2, 4, 16, 8)
    assert ranks_of(mesh, "tp") == list(range(16, 24))
    assert ranks_of(mesh, "shard") == [5 + 8 * i for i in range(16)]
    assert ranks_of(mesh, "replicate") == [21 + 128 * i for i in range(4)]
    assert ranks_of(mesh, "pp") == [21, 21 + 512]


def test_drawing_in_the_docstring_of_build_mesh() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    coordinates = build_mesh("cpu", tp=2, replicate=2, node_size=8).mesh[0]  # (replicate, shard, tp) -> rank
    dist.destroy_process_group()
    assert coordinates[1, 2, 1] == 13
    assert coordinates.flatten().tolist() == list(range(16))


def test_axes_of_size_one_keep_their_names(world: int) -> None:
    mesh = build_mesh("cpu")
    assert mesh.shape == (1, 1, 1024, 1)
    assert data_axes(mesh["shard"]).shard_size == 1024
    hybrid = data_axes(mesh["replicate", "shard"])
    assert (hybrid.replicate_size, hybrid.shard_size) == (1, 1024)


@pytest.mark.parametrize("open_axis", ["tp", "replicate", "shard", "pp"])
def test_any_one_axis_takes_what_remains(world: int, open_axis: str) -> None:
    sizes = {"tp": 2, "replicate": 4, "shard": 8, "pp": 16, open_axis: -1}
    known = {"tp": 2, "replicate": 4, "shard": 8, "pp": 16}
    mesh = build_mesh("cpu", **sizes)
    assert mesh[open_axis].size() == known[open_axis]


def test_tp_may_fill_a_fast_domain_larger_than_the_node(world: int) -> None:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8"):
        assert build_mesh("cpu", tp=16, node_size=64)["tp"].size() == 16
        with pytest.raises(
            ValueError, match=r"tp=16 does not divide the node size 8: .* ranks 0 to 15 would leave"
        ):
            build_mesh("cpu", tp=16)


@pytest.mark.parametrize("world", [24], indirect=True)
def test_tp_that_straddles_two_nodes_is_refused_with_its_ranks(world: int) -> None:
    with pytest.raises(ValueError, match=r"tp group of ranks 6 to 11 would leave the node of ranks 0 to 7"):
        build_mesh("cpu", tp=6, node_size=8)


@pytest.mark.parametrize("world", [24], indirect=True)
def test_a_world_inside_one_node_takes_any_tp_that_divides_it(world: int) -> None:
    assert build_mesh("cpu", tp=6, node_size=72)["tp"].size() == 6


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, r"replicate=1 x shard=-1 x tp=3: 3 does not divide the world size 1024"),
        (
            {"tp": 2, "shard": 4},
            r"the product is 8, not the world size 1024. Choose sizes that multiply to 1024",
        ),
        ({"tp": 2, "shard": 1024}, r"the product is 2048, not the world size 1024"),
        ({"tp": -1}, r"more than one size is -1. Give all but one of \['shard', 'tp'\]"),
        ({"pp": 0}, r"pp=0 .*: a size is positive, or -1"),
        ({"replicate": -2}, r"replicate=-2 .*: a size is positive, or -1"),
        ({"node_size": 0}, r"node_size=0 is not positive"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world_are_refused(
    world: int, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_mesh("cpu", **sizes)


@pytest.mark.parametrize(
    "make", [default_mesh, lambda: build_mesh("cpu")], ids=["default_mesh", "build_mesh"]
)
def test_no_process_group_and_no_launcher_says_how_to_start(make: object) -> None:
    with (
        mock.patch.dict(os.environ, {"RANK": "0"}, clear=True),
        pytest.raises(ValueError, match=r"WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set .* with torchrun"),
    ):
        make()  # type: ignore[operator]


# ---------------------------------------------------------------- reading a mesh


def test_default_mesh_spans_the_world_on_this_machines_device(world: int) -> None:
    mesh = default_mesh()
    assert (mesh.ndim, mesh.size(), mesh.mesh_dim_names) == (1, 1024, None)
    assert (mesh.device_type == "cpu") == (not torch.accelerator.is_available())
    assert device_of(mesh).type == mesh.device_type


def test_one_axis_shards(world: int) -> None:
    mesh = build_mesh("cpu", tp=8)["shard"]
    axes = data_axes(mesh)
    assert axes.mesh is mesh
    assert axes.shard_group is mesh.get_group()
    assert (axes.shard_size, axes.shard_rank, axes.replicate_size, axes.replicate_rank) == (128, 2, 1, 0)
    assert axes.replicate_group is None
    assert axes.size == 128
    assert axes.placements(Shard(0)) == (Shard(0),)


def test_two_axes_replicate_then_shard(world: int) -> None:
    axes = data_axes(build_mesh("cpu", tp=8, replicate=64)["replicate", "shard"])
    assert (axes.shard_size, axes.shard_rank) == (2, 0)
    assert (axes.replicate_size, axes.replicate_rank) == (64, 1)
    assert axes.size == 128
    assert axes.placements(Shard(1)) == (Replicate(), Shard(1))


def test_several_axes_of_one_role_become_one(world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4, 16, 8), mesh_dim_names=("outer", "inner", "cp", "tp"))
    dims = DataParallelMeshDims(shard=("inner", "cp"), replicate="outer")
    axes = data_axes(mesh, dims)
    assert (axes.shard_size, axes.shard_rank, axes.replicate_size) == (64, 2, 2)
    assert axes.mesh.shape == (2, 64)
    assert (axes.spmd_mesh, axes.spmd_dims) == (mesh, dims)
    assert dist.get_process_group_ranks(axes.shard_group) == [5 + 8 * i for i in range(64)]


def test_flattening_twice_makes_no_second_group(world: int) -> None:
    mesh = build_mesh("cpu", pp=2, tp=8)
    dims = DataParallelMeshDims(shard=("replicate", "shard"))
    assert data_axes(mesh, dims) == data_axes(mesh, dims)


def test_replicate_alone_has_no_shard_axis(world: int) -> None:
    axes = data_axes(build_mesh("cpu", tp=8), DataParallelMeshDims(replicate="shard"))
    assert (axes.shard_size, axes.shard_rank, axes.shard_group) == (1, 0, None)
    assert (axes.replicate_size, axes.replicate_rank) == (128, 2)
    assert axes.placements(Shard(0)) == (Replicate(),)


def test_torch_mesh_infos_are_read_by_their_roles(world: int) -> None:
    mesh = build_mesh("cpu", tp=8, replicate=4)
    hybrid = mesh["replicate", "shard"]
    assert axes_of_mesh_info(FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)) == data_axes(mesh["shard"])
    assert axes_of_mesh_info(HSDPMeshInfo(hybrid, 1, 0)) == data_axes(hybrid)
    assert axes_of_mesh_info(DDPMeshInfo(mesh["shard"], replicate_mesh_dim=0)).replicate_size == 32


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("pp", "replicate", "shard"),
            r"expected 1 axis \(shard\) or 2 \(replicate, shard\), got .*dp_mesh_dims",
        ),
        (("shard", "tp"), r"the first replicates and the second shards, got \('shard', 'tp'\)"),
        (("replicate", "tp"), r"got \('replicate', 'tp'\)"),
        (("pp", "replicate"), r"got \('pp', 'replicate'\)"),
    ],
)
def test_a_mesh_whose_axes_have_other_roles_is_refused(
    world: int, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        data_axes(build_mesh("cpu", tp=8, replicate=2)[names])


def test_two_axes_without_names_are_refused(world: int) -> None:
    with pytest.raises(ValueError, match=r"have no names, .* Pass mesh_dim_names=\('replicate', 'shard'\)"):
        data_axes(init_device_mesh("cpu", (8, 128)))


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            DataParallelMeshDims(shard="dp"),
            r"axis 'dp' is not one of the mesh's, \('pp', 'replicate', 'shard', 'tp'\)",
        ),
        (DataParallelMeshDims(shard="shard", replicate=("shard", "pp")), r"axis 'shard' is given twice"),
    ],
)
def test_wrong_dp_mesh_dims_name_the_axis(world: int, dims: DataParallelMeshDims, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_axes(build_mesh("cpu", tp=8), dims)


def test_dp_mesh_dims_need_a_mesh_with_names(world: int) -> None:
    with pytest.raises(ValueError, match=r"axis 'shard' is not one of the mesh's, \(\)"):
        data_axes(default_mesh(), DataParallelMeshDims(shard="shard"))


def test_a_rank_outside_the_mesh_is_told_so(world: int) -> None:
    with pytest.raises(
        ValueError, match=r"rank 21 is not part of DeviceMesh.*do not shard the module on this rank"
    ):
        data_axes(DeviceMesh("cpu", [0, 1, 2, 3]))


def test_what_is_no_mesh_is_a_type_error(world: int) -> None:
    with pytest.raises(
        TypeError, match=r"expected a DeviceMesh, got ProcessGroup. Make one with shardkit.build_mesh"
    ):
        data_axes(dist.group.WORLD)  # type: ignore[arg-type]


# ---------------------------------------------------------------- shard_subgroup


def test_neighbours_on_the_shard_axis_form_a_group_once(world: int) -> None:
    axes = data_axes(build_mesh("cpu", tp=8)["shard"])
    group = shard_subgroup(axes, 4)
    assert dist.get_process_group_ranks(group) == [5, 13, 21, 29]
    assert shard_subgroup(data_axes(build_mesh("cpu", tp=8)["shard"]), 4) is not group
    assert shard_subgroup(axes, 4) is group
    assert shard_subgroup(axes, 2).size() == 2


# ---------------------------------------------------------------- join_meshes


def test_joined_meshes_keep_their_groups(world: int) -> None:
    mesh = build_mesh("cpu", tp=8, replicate=2)
    joined = join_meshes(mesh["replicate", "shard"], mesh["tp"])
    assert joined.mesh_dim_names == ("replicate", "shard", "tp")
    assert joined.get_group("tp") is mesh.get_group("tp")
    assert joined.get_group("shard") is mesh.get_group("shard")


def test_meshes_that_do_not_fit_together_are_refused(world: int) -> None:
    mesh = build_mesh("cpu", tp=8, replicate=2)
    with pytest.raises(ValueError, match=r"an axis has no name. Pass mesh_dim_names"):
        join_meshes(default_mesh(), mesh["tp"])
    with pytest.raises(ValueError, match=r"cannot join .*overlapping.* Slice both from one mesh"):
        join_meshes(mesh["shard"], mesh["replicate", "shard"])
