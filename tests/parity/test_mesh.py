"""Groups that a mesh makes later, on ranks whose meshes differ."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardkit.mesh import build_mesh, data_axes, shard_subgroup
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"replicate": 2}, {"pp": 2}])
def test_slices_of_one_mesh_make_subgroups_side_by_side(sizes: dict[str, int]) -> None:
    def sum_of_subgroup(rank: int, world_size: int) -> float:
        axes = data_axes(build_mesh("cpu", **sizes)["shard"])
        summed = torch.tensor(2.0**rank)
        dist.all_reduce(summed, group=shard_subgroup(axes, 2))
        return summed.item()

    expected = [5.0, 10.0, 5.0, 10.0] if "tp" in sizes else [3.0, 3.0, 12.0, 12.0]
    assert run_ranks(sum_of_subgroup, 4) == expected
