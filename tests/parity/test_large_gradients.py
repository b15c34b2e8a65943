"""Gradients that are taken one by one, as large ones are: over gloo their parts go straight to their owners.

The models of the oracle are small; here nothing is small enough to wait for the end of its unit's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit import fully_shard, grads, reduction
from shardkit.collectives import Op, Pending, Route, count_traffic, native_collectives
from shardkit.interop import units_in
from tests.parity import test_extensions as extensions
from tests.parity import test_oracle as oracle
from tests.parity import test_uneven_use as uneven
from tests.parity.conftest import ragged_fully_shard
from tests.parity.test_fsdp2_settings import CountingReduceScatter
from tests.support.models import MLP, normal_batch
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def nothing_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grads, "grads_to_sweep", lambda grad_bytes: frozenset())


@pytest.mark.parametrize(
    ("strategy", "world_size", "placement"),
    [("full", 3, "rows"), ("full", 3, "mixed"), ("hybrid", 4, "rows"), ("hybrid", 4, "ragged")],
)
def test_gradients_and_steps_equal_those_of_one_process(
    strategy: str, world_size: int, placement: str
) -> None:
    oracle.test_gradients_and_steps_equal_those_of_one_process(strategy, world_size, placement)


@pytest.mark.parametrize(
    "run",
    [
        ("full", 3, "unsynced", "rows"),
        ("full", 3, "unsynced", "ragged"),
        ("kept", 2, "unsynced_kept", "mixed"),
        ("hybrid", 4, "all_reduce_last", "mixed"),
    ],
)
def test_accumulated_gradients_equal_those_of_one_process(run: tuple[str, int, str, str]) -> None:
    oracle.test_accumulated_gradients_equal_those_of_one_process(*run)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_ranks_may_use_different_units_with_the_opt_in(shape: tuple[int, ...]) -> None:
    uneven.test_ranks_may_use_different_units_with_the_opt_in(True, shape)


def test_a_collective_that_is_set_between_micro_batches_is_used_from_the_next_reduction_on() -> None:
    def check(rank: int, world_size: int) -> None:
        model, whole, reduce = nn.Linear(5, 6), nn.Linear(5, 6), CountingReduceScatter()
        whole.load_state_dict(model.state_dict())
        fully_shard(model, init_device_mesh("cpu", (world_size,)))
        for step, num_calls in enumerate([0, 0, 1]):
            model.set_requires_gradient_sync(step > 0)
            for r in range(world_size):
                whole(normal_batch(r, 4, 5)).square().mean().div(world_size).backward()
            model(normal_batch(rank, 4, 5)).square().mean().backward()
            model.set_custom_reduce_scatter(reduce)
            assert reduce.num_calls == num_calls
        for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(param.grad, DTensor) and expected.grad is not None
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)

    run_ranks(check, 2)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_a_gradient_of_a_subclass_is_made_plain(
    param_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions.test_a_gathered_subclass_may_live_in_the_outputs(param_dtype, monkeypatch)


@pytest.mark.parametrize("shard", [fully_shard, ragged_fully_shard])
@pytest.mark.parametrize(
    ("world_size", "num_rows", "num_cols"), [(2, 5, 3), (3, 97, 96), (4, 1201, 256)], ids=["2", "3", "4"]
)  # at 4 ranks, parts of more than a block of the sum
def test_they_are_sent_as_they_are_and_nobody_writes_to_them(
    world_size: int,
    num_rows: int,
    num_cols: int,
    shard: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many messages as c10d counts, no byte beside the gradients but flags, and the same sums."""
    sent_numels = []
    reduce_scatter_parts = reduction.reduce_scatter_parts

    def watched(
        outputs: Sequence[Tensor], sends: Sequence[Sequence[Tensor]], route: Route, label: str, op: Op
    ) -> Pending:
        parts = list(chain.from_iterable(sends))
        before = [part.clone() for part in parts]
        pending = reduce_scatter_parts(outputs, sends, route, label, op)
        pending.wait()
        assert all(map(torch.equal, parts, before))
        sent_numels.extend(part.numel() for part in parts)
        return pending

    def check(rank: int, world_size: int) -> None:
        monkeypatch.setattr(reduction, "reduce_scatter_parts", watched)
        integers = torch.arange(4.0 * num_cols).view(4, num_cols) + rank  # sums are exact in any order
        of_modes = []
        for mode in (nullcontext, native_collectives):
            model = nn.Linear(num_cols, num_rows)
            shard(model, init_device_mesh("cpu", (world_size,)))
            with mode(), count_traffic() as traffic:
                model(integers).sum().backward()
            of_modes.append(([local_grad(param) for param in model.parameters()], traffic.num_calls))
        (direct, calls), (in_rows, native_calls) = of_modes
        assert calls == native_calls
        assert all(map(torch.equal, direct, in_rows))
        assert sum(sent_numels) == num_rows * num_cols + num_rows + 16 * world_size  # a row of flags to each

    run_ranks(check, world_size)


def local_grad(param: nn.Parameter) -> Tensor:
    assert isinstance(param.grad, DTensor)
    return param.grad.to_local()


class Sum(nn.Module):
    """Autograd passes one gradient on to all three, to `flat` as a view of it, and to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.flat, self.last = (nn.Parameter(torch.zeros(s)) for s in ((4, 6), (24,), (4, 6)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first + self.flat.view(4, 6) + self.last


def test_gradients_that_share_bytes_accumulate_apart() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        model, x, weight = (
            nn.Sequential(Sum(), Sum()),
            torch.zeros(4, 6, requires_grad=True),
            torch.ones(4, 6),
        )
        for module in (*model, model):
            fully_shard(module, mesh)
        for is_last in (False, False, True):
            model.set_requires_gradient_sync(is_last)
            (model(x) * weight).sum().backward()
        for grad in (x.grad, *(param.grad for param in model.parameters())):
            assert grad is not None
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert torch.equal(full.view(4, 6), 3 * weight)

    run_ranks(check, 2)


def test_a_gradient_with_bytes_of_its_own_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    add = grads.GradBuffer.add

    def watched(buffer: grads.GradBuffer, new: Mapping[int, Tensor]) -> None:
        places.extend(grad.data_ptr() for grad in new.values())
        add(buffer, new)

    def check(rank: int, world_size: int) -> None:
        monkeypatch.setattr(grads.GradBuffer, "add", watched)
        model = nn.Linear(5, 6)
        fully_shard(model, init_device_mesh("cpu", (world_size,)))
        model.set_requires_gradient_sync(False)
        model(normal_batch(rank, 4, 5)).square().mean().backward()
        (bucket,) = units_in(model)[0].buckets
        kept = bucket.grads.take().direct
        assert sorted(grad.data_ptr() for grad in kept) == sorted(places) and len(kept) == 2

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_they_have_no_history_where_backward_builds_a_graph() -> None:
    def check(rank: int, world_size: int) -> None:
        model, whole = MLP(5, 7, 3), MLP(5, 7, 3)
        whole.load_state_dict(model.state_dict())
        mesh = init_device_mesh("cpu", (world_size,))
        for module in (*model.layers, model):
            fully_shard(module, mesh)
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            for r in range(world_size):
                whole(normal_batch(r, 4, 5)).square().mean().div(world_size).backward(create_graph=True)
            model(normal_batch(rank, 4, 5)).square().mean().backward(create_graph=True)
        for layer in model.layers:
            layer.reshard()  # which the graph kept gathered
        for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert expected.grad is not None
            assert isinstance(param.grad, DTensor)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
            assert not local_grad(param).requires_grad

    run_ranks(check, 2)


def test_a_hook_between_the_reductions_sees_zeros_beside_them() -> None:
    def check(rank: int, world_size: int) -> list[float]:
        torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
        model, sums = nn.Linear(5, 7), []
        fully_shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        model.set_all_reduce_hook(lambda row: sums.append(row.sum().item()))
        model(torch.ones(4, 5)).sum().backward()
        return sums

    num_samples, num_columns = 4 * 4, 5 + 1  # of all ranks; the bias is one more column
    expected = [[float(num_samples * num_columns * num_rows)] for num_rows in (4, 3)]
    assert run_ranks(check, 4) == expected * 2
