"""Collectives and bytes of a step equal the theory, for every strategy.

The model is three bias-free linear layers of WIDTH x WIDTH, the first two units of their own: M elements a
unit, and nothing to pad. Of a buffer of n elements over F ranks, each rank sends (F-1) n/F in a gather and in
a reduction, 2 (F-1) n/F in an all-reduce. Reductions carry a tail of FLAGS elements behind each row.

    strategy                          gathers a unit   reductions a unit   all-reduces a unit
    full shard                        2                1                   -
    kept after forward                1                1                   -
    copies (F = 1)                    -                -                   1
    hybrid                            2                1                   1, of n/F elements
    micro-batch without sync, kept    1, then none     at the last one     at the last one
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from shardkit import MixedPrecisionPolicy, fully_shard
from shardkit.collectives import Traffic, count_traffic, native_collectives
from tests.support.models import CASES, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("both_layouts")

WIDTH = 48  # divides by 2, 3 and 4; a row of a shard fills whole alignments
M = WIDTH * WIDTH
FLAGS = 16  # two a parameter, filled up to the alignment
NUM_UNITS = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def flat(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def grid(replicate: int, shard: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def sharded(**options: object) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_UNITS)))
    for module in (model[0], model[1], model):
        fully_shard(module, **options)
    return model


def train_step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().mean().backward()


def counted(action: Callable[[], object]) -> Traffic:
    with count_traffic() as traffic:
        action()
    return traffic


def assert_traffic(traffic: Traffic, **expected: tuple[int, int]) -> None:
    """Each kind's (calls, bytes sent); kinds that are not named must not occur."""
    seen = {
        kind: (traffic.num_calls[kind], traffic.sent_bytes[kind]) for kind in traffic.num_calls | expected
    }
    assert seen == expected, f"{seen}, expected {expected}"


def gathers(num: int, over: int, itemsize: int = 4) -> tuple[int, int]:
    return num, num * (over - 1) * M // over * itemsize


def reductions(num: int, over: int, itemsize: int = 4) -> tuple[int, int]:
    return num, num * (over - 1) * (M // over + FLAGS) * itemsize


def all_reductions(num: int, replicas: int, shards: int) -> tuple[int, int]:
    return num, num * (2 * (replicas - 1) * 4 * (M // shards + FLAGS) // replicas)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_full_shard_gathers_twice_and_kept_units_once(world_size: int) -> None:
    def check(rank: int, world_size: int) -> None:
        reduced = reductions(NUM_UNITS, world_size)
        for setting, num_gathers in ((True, 2 * NUM_UNITS), (None, 2 * NUM_UNITS - 1), (False, NUM_UNITS)):
            model = sharded(mesh=flat(world_size), reshard_after_forward=setting)
            for _ in range(2):
                assert_traffic(
                    counted(lambda model=model: train_step(model)),
                    all_gather=gathers(num_gathers, world_size),
                    reduce_scatter=reduced,
                )

    run_ranks(check, world_size)


def test_bfloat16_halves_what_is_gathered() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(mp_policy=BF16, reshard_after_forward=True)
        expected = {
            "all_gather": gathers(2 * NUM_UNITS, world_size, itemsize=2),
            "reduce_scatter": reductions(NUM_UNITS, world_size, itemsize=4),
        }
        assert_traffic(counted(lambda: train_step(model)), **expected)

    run_ranks(check, 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_copies_take_one_all_reduce_a_unit(world_size: int) -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(mesh=grid(world_size, 1))
        expected = all_reductions(NUM_UNITS, world_size, shards=1)
        assert_traffic(counted(lambda: train_step(model)), all_reduce=expected)

    run_ranks(check, world_size)


def test_hybrid_talks_inside_a_replica_and_all_reduces_shards() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(mesh=grid(2, 2), reshard_after_forward=True)
        inside = {"all_gather": gathers(2 * NUM_UNITS, 2), "reduce_scatter": reductions(NUM_UNITS, 2)}
        across = all_reductions(NUM_UNITS, replicas=2, shards=2)
        assert_traffic(counted(lambda: train_step(model)), **inside, all_reduce=across)
        model.set_requires_all_reduce(False)
        assert_traffic(counted(lambda: train_step(model)), **inside)
        model.set_requires_all_reduce(True)
        assert_traffic(counted(lambda: train_step(model)), **inside, all_reduce=across)

    run_ranks(check, 4)


def test_a_number_of_ranks_gathers_over_those_in_backward() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(reshard_after_forward=2)
        calls, sent = gathers(NUM_UNITS, 4)
        calls_again, sent_again = gathers(NUM_UNITS, 2)
        assert_traffic(
            counted(lambda: train_step(model)),
            all_gather=(calls + calls_again, sent + sent_again),
            reduce_scatter=reductions(NUM_UNITS, 4),
        )

    run_ranks(check, 4)


def test_one_rank_sends_nothing() -> None:
    def check(rank: int, world_size: int) -> None:
        for mesh in (flat(1), grid(1, 1)):
            assert_traffic(counted(lambda mesh=mesh: train_step(sharded(mesh=mesh))))

    run_ranks(check, 1)


# ---------------------------------------------------------------- accumulation


def test_without_sync_nothing_is_reduced_and_kept_units_are_not_gathered_again() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(reshard_after_forward=False)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        assert_traffic(counted(lambda: train_step(model)), all_gather=gathers(NUM_UNITS, 2))
        assert_traffic(counted(lambda: train_step(model)))
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        assert_traffic(counted(lambda: train_step(model)), reduce_scatter=reductions(NUM_UNITS, 2))
        assert_traffic(
            counted(lambda: train_step(model)),
            all_gather=gathers(NUM_UNITS, 2),
            reduce_scatter=reductions(NUM_UNITS, 2),
        )

    run_ranks(check, 2)


def test_without_sync_freed_units_are_only_gathered() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(reshard_after_forward=True)
        model.set_requires_gradient_sync(False)
        assert_traffic(counted(lambda: train_step(model)), all_gather=gathers(2 * NUM_UNITS, 2))

    run_ranks(check, 2)


# ---------------------------------------------------------------- what is left out, and what adds nothing


def test_a_forward_without_grad_gathers_every_unit_once() -> None:
    def check(rank: int, world_size: int) -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            for setting in (True, False, None):
                model = sharded(reshard_after_forward=setting)
                with mode():
                    for _ in range(2):
                        traffic = counted(lambda model=model: model(torch.ones(2, WIDTH)))
                        assert_traffic(traffic, all_gather=gathers(NUM_UNITS, 2))

    run_ranks(check, 2)


def test_frozen_units_are_not_reduced() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(reshard_after_forward=True)
        model[1].requires_grad_(False)
        assert_traffic(
            counted(lambda: train_step(model)),
            all_gather=gathers(2 * NUM_UNITS, 2),
            reduce_scatter=reductions(NUM_UNITS - 1, 2),
        )
        model[0].requires_grad_(False)  # nothing below needs a gradient: its weights neither
        assert_traffic(
            counted(lambda: train_step(model)),
            all_gather=gathers(2 * NUM_UNITS - 2, 2),
            reduce_scatter=reductions(NUM_UNITS - 2, 2),
        )

    run_ranks(check, 2)


def test_a_frozen_parameter_of_a_unit_does_not_travel_in_its_reduction() -> None:
    def check(rank: int, world_size: int) -> None:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_UNITS)))
        model[0].requires_grad_(False)
        fully_shard(model)
        num_gathers = len(fully_shard.state(model).unit.buckets)  # ragged ones are planned, and travel, apart
        assert_traffic(
            counted(lambda: train_step(model)),
            all_gather=(num_gathers, gathers(NUM_UNITS, 2)[1]),
            reduce_scatter=(1, (M // 2 * (NUM_UNITS - 1) + FLAGS) * 4),
        )

    run_ranks(check, 2)


def test_no_backward_gather_where_backward_does_not_need_the_weights() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(reshard_after_forward=True)
        model[0].set_unshard_in_backward(False)
        traffic = counted(lambda: train_step(model))
        assert traffic.num_calls["all_gather"] == 2 * NUM_UNITS - 1

    run_ranks(check, 2)


def test_explicit_prefetch_adds_no_gather() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(reshard_after_forward=True)
        model.set_modules_to_forward_prefetch([model[0], model[1]])
        model[1].set_modules_to_backward_prefetch([model[0]])
        for _ in range(2):
            assert_traffic(
                counted(lambda: train_step(model)),
                all_gather=gathers(2 * NUM_UNITS, 2),
                reduce_scatter=reductions(NUM_UNITS, 2),
            )

    run_ranks(check, 2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_units_are_gathered_for_the_recomputation_only(use_reentrant: bool) -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(reshard_after_forward=True)

        def step() -> None:
            x = torch.ones(2, WIDTH, requires_grad=True)
            for layer in model[:2]:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            x.square().mean().backward()

        step()
        traffic = counted(step)
        assert (traffic.num_calls["all_gather"], traffic.num_calls["reduce_scatter"]) == (4, 2)

    run_ranks(check, 2)


def test_an_unshard_saves_forward_its_gather() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(reshard_after_forward=True)
        first = counted(lambda: model[0].unshard())
        assert_traffic(first, all_gather=gathers(1, 2))
        traffic = counted(lambda: model(torch.ones(2, WIDTH)))
        assert_traffic(traffic, all_gather=gathers(NUM_UNITS - 1, 2))

    run_ranks(check, 2)


# ---------------------------------------------------------------- c10d's own collectives


def test_native_collectives_are_as_many_and_give_the_same_bits() -> None:
    case = CASES["mlp"]

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(normal_batch(rank, 4, 7).requires_grad_()).square().mean()

    def check(rank: int, world_size: int) -> None:
        expected = oracle_grads(case.build(), loss, world_size)
        calls = []
        for mode in (nullcontext, native_collectives):
            model = case.sharded(fully_shard)
            with mode(), count_traffic() as traffic, CommDebugMode() as native:
                loss(model, rank).backward()
            assert_grads_equal(model, expected, world_size)
            calls.append((dict(traffic.num_calls), dict(traffic.sent_bytes)))
        assert calls[0] == calls[1]
        assert native.get_total_counts() == sum(calls[1][0].values())

    run_ranks(check, 2)


def test_what_is_counted_is_the_rows_that_each_rank_sends() -> None:
    def check(rank: int, world_size: int) -> None:
        model = CASES["few_rows"].sharded(fully_shard)
        traffic = counted(lambda: model(normal_batch(rank, 4, 5)))
        units = [*CASES["few_rows"].units(model), model]
        buckets = [bucket for module in units for bucket in fully_shard.state(module).unit.buckets]
        assert traffic.sent_bytes["all_gather"] == sum(2 * 4 * b.spec.layout.row_numel for b in buckets)

    run_ranks(check, 3)
