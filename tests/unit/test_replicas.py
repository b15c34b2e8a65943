"""Whether replicas share work: the rule, the figures, the table; for ranks that no machine here has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardkit.boxes import Layout, local_part
from shardkit.optim import Muon, muon_plan, ragged_layouts
from shardkit.optim.planning import StepPlan
from shardkit.optim.replicas import block_sizes, copies_of, cost_of
from shardkit.placement import RaggedShard
from tests.unit.test_optim_plan import units_of


def hybrid(model: str, num_replicas: int, layers_per_unit: int = 4) -> dict[str, Layout]:
    """On 8 shards and some replicas."""
    layouts = ragged_layouts(units_of(model, layers_per_unit), 8)
    return {
        name: Layout(layout.shape, (num_replicas, 8), (Replicate(), *layout.placements))
        for name, layout in layouts.items()
    }


def seconds(plan: StepPlan) -> float:
    """On accelerators of 500 TFLOP/s, 40 GB/s between machines, nothing overlapped."""
    cost = cost_of([plan])
    return cost.flops / 5e14 + cost.nbytes / 40e9


@pytest.mark.parametrize(
    ("num_replicas", "num_sharing", "at_most"), [(2, 16, 0.116), (8, 64, 0.065), (64, 128, 0.056)]
)
def test_llama_matrices_are_shared_by_as_many_replicas_as_pay(
    num_replicas: int, num_sharing: int, at_most: float
) -> None:
    """64 replicas of 8 shards: 176 ms where each does all of it, 54 ms by a model of the perfect exchange."""
    layouts = hybrid("llama", num_replicas)
    redundant, chosen = (muon_plan(layouts, replicas=replicas) for replicas in ("redundant", "auto"))
    assert seconds(redundant) > 0.176 and redundant.num_ranks == 8
    assert seconds(chosen) < at_most and chosen.num_ranks == num_sharing
    assert sum(chosen.loads) == sum(redundant.loads)
    assert chosen.note.startswith(f"replicas share, {num_sharing} ranks: at most ")
    assert str(chosen).splitlines()[-1] == chosen.note


def test_parts_come_from_the_workers_own_replica_and_results_go_to_all() -> None:
    plan = muon_plan(hybrid("llama", 4), replicas="shared")
    assert any(any(assignment.gathers) for assignment in plan.assignments)
    for assignment in plan.assignments:
        (worker,) = assignment.workers
        assert {t.source // 8 for t in assignment.gathers} <= {worker // 8}
        holders = {share.holder for share in assignment.piece.fields[0].shares}
        assert {t.target for t in assignment.returns} == holders - {worker}


def test_small_matrices_stay_with_each_replica_unless_told_otherwise() -> None:
    layout = Layout((64, 64), (2, 2), (Replicate(), RaggedShard((0,), (32, 32))))
    plans = {
        replicas: muon_plan({"w": layout, "v": layout}, placement="owner", replicas=replicas)
        for replicas in ("auto", "redundant", "shared")
    }
    assert {replicas: plan.num_ranks for replicas, plan in plans.items()} == {
        "auto": 2,
        "redundant": 2,
        "shared": 4,
    }
    assert str(plans["auto"]).splitlines()[-1] == (
        "each replica does all of the work: at most 7.86e+06 FLOPs and 8.19 kB a rank; shared, 7.86e+06 "
        "FLOPs and 16.4 kB"
    )
    assert plans["redundant"].note == ""
    assert plans["shared"].digest != plans["auto"].digest


def test_data_parallel_copies_can_be_shared_and_no_part_needs_to_come() -> None:
    layouts = {str(i): Layout((512, 512), (4,), (Replicate(),)) for i in range(4)}
    plan = muon_plan(layouts, replicas="shared")
    assert not any(any(assignment.gathers) for assignment in plan.assignments)
    assert len({assignment.workers for assignment in plan.assignments}) == plan.num_ranks > 1


def test_who_holds_copies() -> None:
    assert copies_of((2, 3), (1,), (0, 1)) == ((0, 3), (1, 4), (2, 5))
    assert copies_of((2, 3), (0,), (0, 1)) == ((0, 1, 2), (3, 4, 5))
    assert copies_of((2, 3), (), (0, 1)) == ((0, 1, 2, 3, 4, 5),)
    assert copies_of((2, 3), (0, 1), (0, 1)) == ((0,), (1,), (2,), (3,), (4,), (5,))


def test_ranks_share_in_blocks_of_whole_replicas() -> None:
    of_hybrid, inner = copies_of((4, 2), (1,), (0, 1)), copies_of((4, 2), (0,), (0, 1))
    everywhere, nowhere = copies_of((4, 2), (), (0, 1)), copies_of((4, 2), (0, 1), (0, 1))
    assert block_sizes({of_hybrid}) == [4, 8]
    assert block_sizes({inner}) == [8]
    assert block_sizes({everywhere}) == [2, 4, 8]
    assert block_sizes({of_hybrid, everywhere}) == [4, 8]
    assert block_sizes({of_hybrid, nowhere}) == [8]
    assert block_sizes({nowhere}) == []


def test_parameters_on_different_ranks_have_no_plan_in_common() -> None:
    layouts = {"a": Layout((4, 4), (2, 2), (Replicate(), Shard(0))), "b": Layout((4, 4), (2,), (Shard(0),))}
    with pytest.raises(ValueError, match="expected parameters that one set of ranks cuts, got 2 such sets"):
        muon_plan(layouts, replicas="shared")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replicas": "always"}, r"replicas: expected one of \('auto', 'redundant', 'shared'\).*'always'"),
        ({"replicas": "shared", "placement": "local"}, "not 'shared' where every piece stays"),
    ],
)
def test_a_wish_that_means_nothing_is_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Muon([torch.zeros(2, 2)], **settings)


@pytest.mark.parametrize("placements", [(Replicate(), Shard(0)), (Shard(1), Shard(0))])
def test_a_step_among_ranks_that_do_not_exist_comes_to_an_end(placements: tuple[Placement, ...]) -> None:
    """As benchmarks of one rank's part make it, on one axis that cuts and on two."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 4))
        local = local_part(torch.ones(8, 6), Layout((8, 6), (2, 4), placements), (1, 1))
        param = nn.Parameter(DTensor.from_local(local, mesh, placements))
        optimizer = Muon([param], placement="owner")
        param.grad = torch.zeros_like(param)
        optimizer.step()
        (plan,) = optimizer.plan().steps
        assert plan.num_ranks == (4 if placements[0] == Replicate() else 8)
    finally:
        dist.destroy_process_group()
