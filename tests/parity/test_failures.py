"""Ranks that die, stay away or do something else: a named error soon, never a hang or silently wrong numbers.

Where a rank is waited for in vain, the group has a timeout of a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardkit.checks
from shardkit import MixedPrecisionPolicy, fully_shard
from shardkit._torch import default_store
from shardkit.agreement import check_agreement
from shardkit.collectives import count_traffic
from shardkit.errors import CollectiveTimeoutError, PlanMismatchError
from tests.support.deaths import SOON_S, die, leaving_word, word_of
from tests.support.models import CASES, MLP, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import RankError, errors_on_all_ranks, run_ranks

both_layouts = pytest.mark.usefixtures("both_layouts")  # plans and shards differ; connections do not

CASE = CASES["mlp"]
TIMEOUT_S = 5.0  # of a group one of whose ranks is waited for in vain


# ---------------------------------------------------------------- a rank that dies


def dies_before_forward(model: nn.Module, rank: int) -> None:
    if rank == 1:
        die()
    CASE.loss(model, rank).backward()


def dies_well_before_forward(model: nn.Module, rank: int) -> None:
    if rank == 1:
        die()
    time.sleep(0.3)  # its connections are closed before anything is sent
    CASE.loss(model, rank).backward()


def dies_in_forward(model: nn.Module, rank: int) -> None:
    if rank == 1:
        model.layers[1].register_forward_pre_hook(lambda *_: die())
    CASE.loss(model, rank).backward()


def dies_in_backward(model: nn.Module, rank: int) -> None:
    loss = CASE.loss(model, rank)
    if rank == 1:
        model.layers[2].weight.register_hook(lambda grad: die())
    loss.backward()
    CASE.loss(model, rank).backward()


@pytest.mark.parametrize(
    "dies", [dies_before_forward, dies_well_before_forward, dies_in_forward, dies_in_backward]
)
def test_the_others_learn_at_once_that_a_rank_died(
    dies: Callable[[nn.Module, int], None], tmp_path: Path
) -> None:
    def check(rank: int, world_size: int) -> None:
        model = CASE.sharded(fully_shard)
        CASE.loss(model, rank).backward()
        with leaving_word(tmp_path, rank):
            dies(model, rank)

    with pytest.raises(RankError, match="A peer died"):
        run_ranks(check, 3)
    for rank in (0, 2):
        seconds, message = word_of(tmp_path, rank)
        assert seconds < SOON_S, message
        for words in (
            "CollectiveTimeoutError: unit '",
            f"over ranks [0, 1, 2] failed on rank {rank}",
            "A peer died",
        ):
            assert words in message


# ---------------------------------------------------------------- ranks that do not run the same


class Experts(nn.Module):
    """Experts of one shape, each a unit; `number` chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.experts[number](x)


def test_ranks_that_run_different_units_are_told_which() -> None:
    def check(rank: int, world_size: int) -> None:
        model = Experts()
        for expert in model.experts:
            fully_shard(expert)
        fully_shard(model)
        model(normal_batch(rank, 4, 7), rank)

    first, second = errors_on_all_ranks(
        check, 2, CollectiveTimeoutError, "in another order", group_timeout=TIMEOUT_S
    )
    assert "unit 'experts.0'" in first and "unit 'experts.1'" in second


def test_a_rank_that_raised_leaves_a_named_error_on_the_others() -> None:
    def check(rank: int, world_size: int) -> str:
        model = CASE.sharded(fully_shard)
        if rank == 0:
            model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            CASE.loss(model, rank).backward()
        except (ZeroDivisionError, CollectiveTimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    first, second = run_ranks(check, 2, group_timeout=TIMEOUT_S)
    assert first.startswith("ZeroDivisionError")
    assert second.startswith(
        "CollectiveTimeoutError: unit 'layers.1': all_gather over ranks [0, 1] failed on rank 1"
    )
    assert "it raised an error of its own" in second


# ---------------------------------------------------------------- plans that differ


def sizes_differ(rank: int) -> nn.Module:
    model = MLP(7, 13, 5, 3) if rank != 1 else MLP(7, 13, 6, 3)
    fully_shard(model.layers[0])
    return fully_shard(model)


def layers_differ(rank: int) -> nn.Module:
    model = MLP(7, 13, 5, 3) if rank != 1 else MLP(7, 13, 5, 3, 3)
    return fully_shard(model)


def dtypes_differ(rank: int) -> nn.Module:
    model = MLP(7, 13, 5, 3)
    if rank == 1:
        model.layers[1].double()
    return fully_shard(model)


def units_differ(rank: int) -> nn.Module:
    model = MLP(7, 13, 5, 3)
    fully_shard(model.layers[0] if rank != 1 else model.layers[1])
    return fully_shard(model)


def compute_dtypes_differ(rank: int) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if rank == 1 else None)
    return fully_shard(MLP(7, 13, 5, 3), mp_policy=policy)


def reduce_dtypes_differ(rank: int) -> nn.Module:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if rank == 1 else None)
    return fully_shard(MLP(7, 13, 5, 3), mp_policy=policy)


def frozen_differ(rank: int) -> nn.Module:
    """Layers of one shape, so that their gradients would be added to each other."""
    model = fully_shard(MLP(7, 7, 7))
    model.layers[rank % 2].requires_grad_(False)
    return model


def last_differs(rank: int) -> nn.Module:
    """The last parameter: one of another size that a planner may put first, or that lengthens every row."""
    return fully_shard(MLP(7, 13, 5, 3) if rank != 1 else MLP(7, 13, 5, 64))


DIFFERENCES: dict[Callable[[int], nn.Module], str] = {
    sizes_differ: "layers.1.weight",
    layers_differ: "layers.3.weight",
    last_differs: "layers.2.weight",
    dtypes_differ: "layers.1.weight",
    units_differ: "layers.",
    compute_dtypes_differ: "layers.0.weight",
    reduce_dtypes_differ: "layers.0.weight",
    frozen_differ: "layers.0.weight",
}


@both_layouts
@pytest.mark.parametrize("build", DIFFERENCES)
def test_plans_that_differ_are_an_error_on_every_rank(build: Callable[[int], nn.Module]) -> None:
    def check(rank: int, world_size: int) -> None:
        model = build(rank)
        model(normal_batch(rank, 4, 7)).square().mean().backward()

    words = ("rank 1 planned other shards than rank 0", "First difference", "same model")
    messages = errors_on_all_ranks(check, 3, PlanMismatchError, *words)
    assert f": {DIFFERENCES[build]}" in messages[1]  # each rank tells its own side


def questions_asked() -> list[object]:
    """What a forked rank asks the others about from now on; it grows."""
    asked: list[object] = []

    def count(*args: object, **options: object) -> None:
        asked.append(args)
        check_agreement(*args, **options)

    shardkit.checks.check_agreement = count
    return asked


@both_layouts
def test_equal_plans_are_compared_once_and_train() -> None:
    def check(rank: int, world_size: int) -> None:
        asked = questions_asked()
        model = CASE.sharded(fully_shard)
        for _ in range(2):
            model.zero_grad()
            CASE.loss(model, rank).backward()
        assert len(asked) == 1
        assert_grads_equal(model, oracle_grads(CASE.build(), CASE.loss, world_size), world_size)

    run_ranks(check, 2)


# ---------------------------------------------------------------- ranks that train other parameters later on


def equal_layers() -> nn.Module:
    """Layers of one shape, so that their gradients would be added to each other."""
    model = MLP(7, 7, 7)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


@both_layouts
@pytest.mark.parametrize("gathered", [False, True])
def test_ranks_that_freeze_different_layers_later_are_told_on_every_rank(gathered: bool) -> None:
    def check(rank: int, world_size: int) -> None:
        model = equal_layers()
        CASE.loss(model, rank).backward()
        for layer in model.layers if gathered else ():
            layer.unshard()
        model.layers[rank].requires_grad_(False)
        CASE.loss(model, rank).backward()

    words = (
        "requires_grad was switched",
        "not alike on all ranks",
        "model 'FSDPMLP'",
        "layers.0.weight: requires_grad=",
    )
    errors_on_all_ranks(check, 2, PlanMismatchError, *words)


@pytest.mark.parametrize("switching", [0, 1])
def test_a_rank_that_alone_freezes_a_layer_later_is_told(switching: int) -> None:
    def check(rank: int, world_size: int) -> str:
        shardkit.checks.check_agreement = partial(check_agreement, timeout=timedelta(seconds=1))
        model = equal_layers()
        CASE.loss(model, rank).backward()
        if rank == switching:
            model.layers[0].requires_grad_(False)
        with pytest.raises((PlanMismatchError, CollectiveTimeoutError)) as caught:
            CASE.loss(model, rank).backward()
        return f"{type(caught.value).__name__}: {caught.value}"

    messages = run_ranks(check, 2, group_timeout=TIMEOUT_S)
    for rank, message in enumerate(messages):
        if rank == switching:
            assert message.startswith(
                "PlanMismatchError: model 'FSDPMLP': requires_grad was switched after"
            ), message
        else:
            assert message.startswith("CollectiveTimeoutError: unit '"), message


@both_layouts
def test_ranks_that_freeze_alike_are_asked_once_for_each_choice() -> None:
    """As a generator and a critic in one model do at every step."""

    def check(rank: int, world_size: int) -> None:
        asked = questions_asked()
        model = equal_layers()
        for step in range(6):
            model.layers[0].requires_grad_(step % 2 == 0)
            model.layers[1].requires_grad_(step % 2 == 1)
            CASE.loss(model, rank).backward()
        assert len(asked) == 2

    run_ranks(check, 2)


@both_layouts
@pytest.mark.parametrize(("world_size", "hidden"), [(2, 7), (3, 7), (2, 40)])
def test_ranks_out_of_phase_between_choices_are_told_on_every_rank(world_size: int, hidden: int) -> None:
    """Before rows of the two layers meet, whether these have one size or not."""

    def check(rank: int, world_size: int) -> None:
        model = fully_shard(MLP(7, hidden, 7))
        for step in range(5):
            is_odd = (step + (step == 4 and rank == 1)) % 2 == 1
            model.layers[0].requires_grad_(not is_odd)
            model.layers[1].requires_grad_(is_odd)
            CASE.loss(model, rank).backward()

    words = (
        "model 'FSDPMLP'",
        "some ranks train 'layers.0.weight'",
        "'layers.1.weight'",
        "Switch requires_grad",
    )
    errors_on_all_ranks(check, world_size, PlanMismatchError, *words)


def test_where_devices_run_ahead_the_next_forward_tells_of_ranks_out_of_phase() -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(MLP(7, 7, 7))
        for step in range(3):
            model.layers[0].requires_grad_((step + (step == 2 and rank == 1)) % 2 == 0)
            fully_shard.state(model).unit.tree.streams.runs_ahead = True
            CASE.loss(model, rank)
        dist.barrier()
        CASE.loss(model, rank)

    words = ("model 'FSDPMLP'", "some ranks train 'layers.0.weight'")
    errors_on_all_ranks(check, 2, PlanMismatchError, *words)


def test_known_choices_are_compared_by_one_all_reduce_a_forward() -> None:
    def check(rank: int, world_size: int) -> list[int]:
        model, num_calls = equal_layers(), []
        for step in range(6):
            model.layers[0].requires_grad_(step not in (2, 3))
            with count_traffic() as traffic:
                CASE.loss(model, rank).backward()
                with torch.no_grad():  # nothing is trained by it
                    CASE.loss(model, rank)
            num_calls.append(traffic.num_calls["all_reduce"])
        return num_calls

    assert run_ranks(check, 2) == [[0, 0, 0, 1, 1, 1]] * 2


# ---------------------------------------------------------------- a rank that never comes


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_comes_is_named(missing: int) -> None:
    def check(rank: int, world_size: int) -> str:
        shardkit.checks.check_agreement = partial(check_agreement, timeout=timedelta(seconds=1))
        model = CASE.sharded(fully_shard)
        dist.barrier()  # the second is for ranks that have started
        if rank == missing:
            return "stayed away"
        with pytest.raises(PlanMismatchError) as caught:
            CASE.loss(model, rank)
        return str(caught.value)

    messages = run_ranks(check, 3)
    for rank in {0, 1, 2} - {missing}:
        expected = "ranks [2] of [0, 1, 2] did not bring" if missing else "rank 0 did not compare the plans"
        assert expected in messages[rank] and "every rank must run the same units" in messages[rank]


def test_a_rank_that_planned_otherwise_and_died_is_named() -> None:
    def check(rank: int, world_size: int) -> str:
        group = dist.group.WORLD
        if rank == 1:
            default_store().set(f"shardkit/{group.group_name}/0/1", "a digest of something else")
            return "died"
        with pytest.raises(PlanMismatchError) as caught:
            check_agreement(["a", "b"], group, "model 'M'", timedelta(seconds=0.2))
        return str(caught.value)

    first, _, third = run_ranks(check, 3)
    assert first.startswith("model 'M': rank 1 did not say what it planned otherwise within")
    assert third.startswith("model 'M': rank 0 did not compare the plans of ranks [0, 1, 2] within")


# ---------------------------------------------------------------- replicas that differ


@both_layouts
def test_replicas_built_from_different_seeds_are_warned_of() -> None:
    mesh_names = ("replicate", "shard")

    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=mesh_names)
        torch.manual_seed(rank)
        model = fully_shard(nn.Linear(7, 3), mesh)
        with pytest.warns(UserWarning, match=r"replicas .* start from different weights.*Seed all ranks"):
            model(normal_batch(rank, 4, 7))
        model(normal_batch(rank, 4, 7)).mean().backward()

    run_ranks(check, 2)
