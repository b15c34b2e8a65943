"""The tests' own support: run_ranks when a rank fails, hangs or leaves; the oracle; the models."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.models import CASES, Case
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import RankError, errors_on_all_ranks, run_ranks


def all_reduce_ones() -> float:
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return ones[0].item()


def test_results_come_back_in_rank_order() -> None:
    def fn(rank: int, world_size: int, offset: int) -> tuple[int, float, torch.Tensor]:
        return rank + offset, all_reduce_ones(), torch.full((2,), rank)

    results = run_ranks(fn, 3, 10)
    assert [(index, total) for index, total, _ in results] == [(10, 3.0), (11, 3.0), (12, 3.0)]
    assert torch.equal(results[2][2], torch.tensor([2, 2]))


def test_early_rank_does_not_break_a_late_one() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            time.sleep(0.3)
            dist.recv(torch.zeros(4), 0)

    run_ranks(fn, 2)


def test_failing_rank_is_named_before_its_peers_broken_connections() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("param 'w' is wrong")
        all_reduce_ones()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3: Traceback.*ValueError: param 'w' is wrong"):
        run_ranks(fn, 3)
    assert time.monotonic() - start < 30


def test_assertion_comes_before_an_earlier_error() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            raise ValueError("a consequence")
        time.sleep(0.3)
        assert rank == 0, "the cause"

    with pytest.raises(RankError, match=r"rank 1 of 2: (?s:.*)the cause"):
        run_ranks(fn, 2)


def test_hanging_rank_is_named_with_its_stack_and_killed() -> None:
    def fn(rank: int, world_size: int) -> None:
        while rank == 1:
            time.sleep(0.1)
        all_reduce_ones()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: still runs, at\n.*test_support.py.* in fn"):
        run_ranks(fn, 2, timeout=2)
    assert time.monotonic() - start < 30


def test_hang_of_all_ranks_in_a_collective_ends() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)

    with pytest.raises(RankError, match=r"rank [01] of 2"):
        run_ranks(fn, 2, timeout=2)


def test_a_group_may_give_up_long_before_its_ranks() -> None:
    def fn(rank: int, world_size: int) -> str:
        if rank == 0:
            with pytest.raises(RuntimeError) as caught:
                dist.recv(torch.zeros(1), 1)
            return str(caught.value)
        return "silent"

    start = time.monotonic()
    first, _ = run_ranks(fn, 2, group_timeout=1.0)
    assert "1000ms" in first and time.monotonic() - start < 30


@pytest.mark.parametrize("code", [0, 3])
def test_rank_that_exits_is_named_with_its_code(code: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 1:
            os._exit(code)
        all_reduce_ones()

    with pytest.raises(RankError, match=f"rank 1 of 2: exited with code {code} before it returned"):
        run_ranks(fn, 2)


def test_result_that_cannot_be_pickled_is_an_error_of_the_rank() -> None:
    def fn(rank: int, world_size: int) -> object:
        return lambda: rank

    with pytest.raises(RankError, match=r"rank [01] of 2: (?s:.*)pickle"):
        run_ranks(fn, 2)


def test_expected_errors_are_checked_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        raise TypeError(f"param 'w': rank {rank} of {world_size}")

    assert errors_on_all_ranks(fn, 2, TypeError, "param 'w'", "of 2") == [
        "param 'w': rank 0 of 2",
        "param 'w': rank 1 of 2",
    ]


def test_expected_error_missing_on_one_rank_is_named() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            raise TypeError("param 'w'")

    with pytest.raises(RankError, match=r"rank 1 of 2: (?s:.*)no TypeError was raised"):
        errors_on_all_ranks(fn, 2, TypeError)
    with pytest.raises(RankError, match=r"rank 0 of 1: (?s:.*)lacks \['remedy'\]: param 'w'"):
        errors_on_all_ranks(fn, 1, TypeError, "remedy")


def test_no_process_is_left() -> None:
    def fn(rank: int, world_size: int) -> int:
        return os.getpid()

    for pid in run_ranks(fn, 2):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_warnings_are_errors_in_ranks_too() -> None:
    def fn(rank: int, world_size: int) -> None:
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    errors_on_all_ranks(fn, 1, DeprecationWarning, "old")


def sharded(case: Case, **policy: torch.dtype) -> nn.Module:
    """The case's model under torch's own fully_shard."""
    model = case.build()
    for module in [*case.units(model), model]:
        fully_shard(module, mp_policy=MixedPrecisionPolicy(**policy))
    return model


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"same_branch", "branch_by_rank"}))
def test_oracle_is_torch_fsdp2_to_the_bit_on_two_ranks(name: str, policy: dict[str, torch.dtype]) -> None:
    def fn(rank: int, world_size: int) -> None:
        case = CASES[name]
        model = sharded(case, **policy)
        case.loss(model, rank).backward()
        assert_grads_equal(model, oracle_grads(case.build(), case.loss, world_size, **policy), world_size)

    run_ranks(fn, 2)


def test_oracle_is_torch_fsdp2_nearly_on_three_ranks() -> None:
    def fn(rank: int, world_size: int) -> None:
        case = CASES["transformer"]
        model = sharded(case)
        case.loss(model, rank).backward()
        grads = oracle_grads(case.build(), case.loss, world_size)
        assert_grads_equal(model, grads, world_size)
        grads["norm.weight"] += 2e-6 * grads["norm.weight"].abs().max()
        with pytest.raises(AssertionError, match=r"norm\.weight: off by .*, allowed"):
            assert_grads_equal(model, grads, world_size)

    run_ranks(fn, 3)


def test_oracle_counts_a_rank_that_does_not_use_a_param_as_zero() -> None:
    def fn(rank: int, world_size: int) -> None:
        case = CASES["branch_by_rank"]
        model = case.build()
        grads = oracle_grads(model, case.loss, 3)
        case.loss(model, 1).backward()
        assert isinstance(model.odd.weight, nn.Parameter) and model.odd.weight.grad is not None
        assert torch.equal(grads["odd.weight"], model.odd.weight.grad / 3)
        assert "never.weight" not in grads

    run_ranks(fn, 1)


def test_oracle_leaves_the_model_as_it_was() -> None:
    def fn(rank: int, world_size: int) -> None:
        case = CASES["mlp"]
        model = case.build()
        oracle_grads(model, case.loss, 2, param_dtype=torch.bfloat16)
        assert all(param.dtype == torch.float32 and param.grad is None for param in model.parameters())

    run_ranks(fn, 1)


@pytest.mark.parametrize("name", CASES)
def test_models_are_the_same_at_every_build_and_differ_by_rank(name: str) -> None:
    case = CASES[name]
    losses = [case.loss(case.build(), rank).item() for rank in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
