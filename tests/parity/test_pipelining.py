"""torch's pipeline schedules over sharded stages: 2 stages x 2 shards, equal to one process.

rank        0        1        2        3
1F1B        blocks 0 1        blocks 2 3
interleaved blocks 0, 2       blocks 1, 3
V shape     blocks 0, 3       blocks 1, 2
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardkit import Blocks, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from shardkit.collectives import count_traffic
from tests.support.models import normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import run_ranks

DIM, NUM_BLOCKS, NUM_MICRO_BATCHES = 7, 4, 4


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(NUM_BLOCKS)))


def loss(model: nn.Module, rank: int) -> Tensor:
    return model(normal_batch(rank, 2 * NUM_MICRO_BATCHES, DIM)).square().mean()


@dataclass(frozen=True, slots=True)
class Layout:
    """A schedule, and which blocks make each stage: stages[pp rank] -> [(stage index, blocks)]."""

    schedule: type
    stages: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]

    @property
    def num_stages(self) -> int:
        return sum(len(of_rank) for of_rank in self.stages)


LOOPED = (((0, (0,)), (2, (2,))), ((1, (1,)), (3, (3,))))
LAYOUTS = {
    "1f1b": Layout(Schedule1F1B, (((0, (0, 1)),), ((1, (2, 3)),))),
    "interleaved": Layout(ScheduleInterleaved1F1B, LOOPED),
    "zero_bubble": Layout(ScheduleInterleavedZeroBubble, LOOPED),
    "zero_bubble_v": Layout(ScheduleZBVZeroBubble, (((0, (0,)), (3, (3,))), ((1, (1,)), (2, (2,))))),
}


def stages_of(layout: Layout, mesh: DeviceMesh, **options: object) -> list[PipelineStage]:
    """This rank's stages: each block a unit, and each stage's root."""
    model, stages = build(), []
    for index, blocks in layout.stages[mesh.get_local_rank("pp")]:
        stage = nn.Sequential(OrderedDict((str(block), model[block]) for block in blocks))
        for block in stage:
            fully_shard(block, mesh["shard"], **options)
        fully_shard(stage, mesh["shard"], **options)
        stages.append(
            PipelineStage(stage, index, layout.num_stages, torch.device("cpu"), group=mesh["pp"].get_group())
        )
    return stages


def schedule_of(layout: Layout, stages: list[PipelineStage]) -> object:
    given = stages[0] if layout.schedule is Schedule1F1B else stages
    return layout.schedule(
        given, n_microbatches=NUM_MICRO_BATCHES, loss_fn=lambda output, _: output.square().mean()
    )


def run_step(schedule: object, mesh: DeviceMesh, data_rank: int, layout: Layout) -> None:
    batch = normal_batch(data_rank, 2 * NUM_MICRO_BATCHES, DIM)
    of_rank = [index for index, _ in layout.stages[mesh.get_local_rank("pp")]]
    inputs = (batch,) if 0 in of_rank else ()
    target = batch if layout.num_stages - 1 in of_rank else None
    schedule.step(*inputs, target=target)


RUNS = [(name, setting, None) for name in LAYOUTS for setting in (False, True)]
RAGGED_RUNS = [
    ("1f1b", True, Blocks()),
    ("interleaved", False, Blocks()),
    ("zero_bubble", True, Blocks()),
    ("zero_bubble_v", None, Blocks()),
]
HALVES = "gradients of inputs and of weights apart.*reshard_after_forward=False"


@pytest.mark.parametrize(("name", "setting", "wish"), RUNS + RAGGED_RUNS)
def test_a_schedule_gives_the_gradients_of_one_process(
    name: str, setting: bool | None, wish: Blocks | None
) -> None:
    layout = LAYOUTS[name]
    grads = oracle_grads(build(), loss, 2)

    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
        stages = stages_of(layout, mesh, reshard_after_forward=setting, shard_placement_fn=lambda param: wish)
        if len(stages) > 1:
            share_comm_ctx([stage.submod for stage in stages])
        schedule = schedule_of(layout, stages)
        # the first stage has no gradients of inputs to compute apart
        halves = [name.startswith("zero") and stage.stage_index > 0 for stage in stages]
        for step in range(3):
            for stage in stages:
                stage.submod.zero_grad()
            warns = step == 0 and setting is not False and any(halves)
            warning = pytest.warns(UserWarning, match=HALVES) if warns else nullcontext()
            with count_traffic() as traffic, warning:
                run_step(schedule, mesh, mesh.get_local_rank("shard"), layout)
            for stage in stages:
                own = {key: grads[key] for key, _ in stage.submod.named_parameters()}
                assert_grads_equal(stage.submod, own, 4)
            num_units = NUM_BLOCKS // 2  # with parameters, on each pp rank
            if step > 0:
                assert traffic.num_calls["reduce_scatter"] == num_units
            if step > 0 and (setting is False or all(halves)):
                assert traffic.num_calls["all_gather"] == num_units, "a gather for every micro-batch"

    run_ranks(check, 4)


def test_a_pipeline_trains_in_mixed_precision() -> None:
    layout = LAYOUTS["interleaved"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
        stages = stages_of(layout, mesh, mp_policy=policy, reshard_after_forward=False)
        schedule = schedule_of(layout, stages)
        run_step(schedule, mesh, mesh.get_local_rank("shard"), layout)
        expected = oracle_grads(build(), loss, 2)
        for stage in stages:
            for key, param in stage.submod.named_parameters():
                assert param.grad.dtype == torch.float32
                largest = expected[key].abs().max().item()
                torch.testing.assert_close(
                    param.grad.full_tensor(), expected[key], rtol=0.0, atol=0.05 * largest
                )

    run_ranks(check, 4)
