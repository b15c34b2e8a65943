"""Ranks that die in an optimizer step or stay away from it: a named error on the others, and never a hang."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

import shardkit.optim.teams
from shardkit import Blocks, clip_grad_norm_, fully_shard
from shardkit.agreement import check_agreement
from shardkit.errors import CollectiveTimeoutError, PlanMismatchError
from shardkit.optim import SOAP, Muon, Projection, qk_clip_
from tests.parity.test_muon import Net, assert_same, give_grads, matrices, sharded
from tests.support.deaths import SOON_S, die, leaving_word, word_of
from tests.support.ranks import RankError, errors_on_all_ranks, run_ranks

SHAPES = [(48, 32), (24, 80), (33, 40), (64, 64)]
TIMEOUT_S = 5.0  # of a group one of whose ranks is waited for in vain


ALONG: Mapping[str, list[Placement]] = {
    "shards": [Shard(0)],
    "replicas": [Replicate()],
    "two axes": [Shard(0), Shard(1)],
}


def build(world_size: int, along: str = "shards", **settings: object) -> Muon:
    mesh = init_device_mesh("cpu", (world_size,) if along != "two axes" else (2, world_size // 2))
    params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: ALONG[along])
    named = [(f"w{i}", param) for i, param in enumerate(params)]
    optimizer = Muon(named, placement="owner", **settings)
    give_grads(params, matrices(1, SHAPES))
    return optimizer


def told_after_one_skips(optimizer: Muon, rank: int) -> str:
    """What the others learn where all step once and rank 1 does not step again."""
    optimizer.step()
    if rank == 1:
        return "skipped"
    with pytest.raises(CollectiveTimeoutError) as caught:
        optimizer.step()
    return str(caught.value)


def dies_before_the_step(optimizer: Muon, rank: int) -> None:
    if rank == 1:
        die()
    time.sleep(0.3)  # its connections are closed by now
    optimizer.step()


def dies_while_it_works(optimizer: Muon, rank: int) -> None:
    optimizer.step()


@pytest.mark.parametrize("dies", [dies_before_the_step, dies_while_it_works])
def test_the_others_learn_at_once_that_a_rank_died(dies: Callable[[Muon, int], None], tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> None:
        num_calls = 0

        def orthogonalize(stack: object) -> object:
            nonlocal num_calls
            num_calls += 1
            if rank == 1 and num_calls > len(SHAPES):
                die()
            return stack

        optimizer = build(world_size, orthogonalize=orthogonalize, bucket_bytes=1000)
        optimizer.step()
        num_calls += len(SHAPES)
        with leaving_word(tmp_path, rank):
            dies(optimizer, rank)

    with pytest.raises(RankError, match="A peer died"):
        run_ranks(run, 3)
    for rank in (0, 2):
        seconds, message = word_of(tmp_path, rank)
        assert seconds < SOON_S, message
        assert message.startswith("CollectiveTimeoutError: optimizer step: all_to_all over ranks [0, 1, 2] ")
        assert f"failed on rank {rank}" in message and "Every rank must call step()" in message


def test_a_rank_that_does_not_say_which_gradients_it_has_is_waited_for() -> None:
    def run(rank: int, world_size: int) -> str:
        optimizer = build(world_size, missing_grads="agree")
        return told_after_one_skips(optimizer, rank)

    first, _ = run_ranks(run, 2, group_timeout=TIMEOUT_S)
    assert first.startswith(
        "optimizer step, asking which gradients are missing: all_reduce over ranks [0, 1] "
    )


@pytest.mark.parametrize("along", ALONG)
def test_a_rank_that_skips_a_step_is_waited_for_by_name(along: str) -> None:
    """Replicas that share wait for each other too."""
    world_size = 4 if along == "two axes" else 2

    def run(rank: int, world_size: int) -> str:
        optimizer = build(world_size, along, replicas="shared")
        return told_after_one_skips(optimizer, rank)

    first, *_ = run_ranks(run, world_size, group_timeout=TIMEOUT_S)
    assert f"optimizer step: all_to_all over ranks {list(range(world_size))} failed on rank 0" in first
    assert "It waited for 'w" in first and "1" in first.partition("from ranks ")[2].partition("]")[0]


def test_a_rank_that_skips_a_step_and_goes_on_is_no_step_behind_the_others() -> None:
    """As for a loss that was not finite there alone: its next forward cannot be taken for the step."""

    def run(rank: int, world_size: int) -> str:
        torch.manual_seed(0)
        model = fully_shard(Net(), shard_placement_fn=lambda param: Blocks())
        optimizer = Muon(model.named_parameters(), placement="owner")
        try:
            for step in range(3):
                model(torch.ones(2, 12)).sum().backward()
                if (rank, step) != (1, 1):
                    optimizer.step()
                optimizer.zero_grad()
        except CollectiveTimeoutError as error:
            return str(error)
        return "nothing"

    first, second = run_ranks(run, 2, group_timeout=TIMEOUT_S)
    assert "optimizer step: all_to_all" in first and "from ranks [1]" in first
    assert "unit '" in second and "all_gather" in second


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_rank_on_no_mesh_of_the_parameters_is_not_waited_for(is_bound: bool) -> None:
    """As that of another pipeline stage, which may step earlier or later.

    A default group that is bound to its device is used itself; torch would split it, which takes all ranks.
    """

    def run(rank: int, world_size: int) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [3, 4]])
        if is_bound:
            dist.group.WORLD.bound_device_id = torch.device("cpu", 0)
        if rank == 2:
            return
        params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: ALONG["two axes"])
        optimizer = Muon(params, lr=0.02, placement="owner")
        for step in range(2):
            give_grads(params, matrices(step + 1, SHAPES))
            optimizer.step()
        assert_same(params, expected)

    expected = [nn.Parameter(v) for v in matrices(0, SHAPES)]
    oracle = torch.optim.Muon(expected, lr=0.02, adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        give_grads(expected, matrices(step + 1, SHAPES))
        oracle.step()
    run_ranks(run, 5)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_comes_to_the_first_step_is_named(missing: int) -> None:
    def run(rank: int, world_size: int) -> str:
        shardkit.optim.teams.check_agreement = partial(check_agreement, timeout=timedelta(seconds=1))
        optimizer = build(world_size)
        dist.barrier()  # the second is for ranks that have started
        if rank == missing:
            return "stayed away"
        with pytest.raises(PlanMismatchError) as caught:
            optimizer.step()
        return str(caught.value)

    messages = run_ranks(run, 3)
    for rank in {0, 1, 2} - {missing}:
        expected = "ranks [2] of [0, 1, 2] did not bring" if missing else "rank 0 did not compare the plans"
        assert messages[rank].startswith("optimizer step: ") and expected in messages[rank]


FOUND_IN = {"bucket_bytes": "buckets of", "missing_grads": "missing gradients", "nesterov": "'nesterov'"}


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("bucket_bytes", (1 << 20, 1 << 10)),
        ("missing_grads", ("symmetric", "agree")),
        ("nesterov", (True, False)),
    ],
)
def test_ranks_with_other_settings_are_told_so_before_any_message(
    setting: str, values: tuple[object, object]
) -> None:
    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0), mesh, lambda i, shape: [Shard(0)])
        optimizer = Muon(params, placement="owner", **{setting: values[rank]})
        give_grads(params, matrices(1))
        optimizer.step()

    errors_on_all_ranks(run, 2, PlanMismatchError, "optimizer step", FOUND_IN[setting])


class Numbers(Sequence[float]):
    """As a configuration library's list: nothing that it prints as is the same on two ranks."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.numbers[index]

    def __repr__(self) -> str:
        return f"<Numbers of process {os.getpid()}>"


def test_ranks_whose_settings_are_other_objects_of_the_same_numbers_agree() -> None:
    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0), mesh, lambda i, shape: [Shard(0)])
        betas: tuple[Sequence[float], ...] = (Numbers(0.5, 0.75), Numbers(0.5, 0.75), [0.5, 0.75])
        optimizer = SOAP(params, betas=betas[rank], weight_decay=(0, 0.0, 0)[rank])  # type: ignore[arg-type]
        give_grads(params, matrices(1))
        optimizer.step()

    run_ranks(run, 3)


CLIPS: Mapping[str, Callable[[Tensor], object]] = {
    "clip_grad_norm_": lambda weight: clip_grad_norm_(weight, 1.0),
    "clip_grad_norm_, maximum": lambda weight: clip_grad_norm_(weight, 1.0, math.inf),
    "qk_clip_": lambda weight: qk_clip_([Projection("q", weight, torch.ones(4), 4)]),
}


@pytest.mark.parametrize("call", CLIPS)
def test_a_rank_that_dies_before_gradients_or_logits_are_clipped_is_told_of(
    call: str, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> None:
        (weight,) = sharded(matrices(0, [(8, 6)]), init_device_mesh("cpu", (3,)), lambda i, shape: [Shard(0)])
        give_grads([weight], matrices(1, [(8, 6)]))
        CLIPS[call](weight)
        if rank == 1:
            die()
        time.sleep(0.3)  # its connections are closed by now
        with leaving_word(tmp_path, rank):
            CLIPS[call](weight)

    with pytest.raises(RankError, match="A peer died"):
        run_ranks(run, 3)
    label, _, _ = call.partition(",")
    for rank in (0, 2):
        seconds, message = word_of(tmp_path, rank)
        assert seconds < SOON_S, message
        told = f"CollectiveTimeoutError: {label}: all_reduce over ranks [0, 1, 2] failed on rank {rank}: "
        assert message.startswith(told), message
