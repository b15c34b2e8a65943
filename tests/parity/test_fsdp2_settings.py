"""Setting by setting like torch's FSDP2: every `set_*` method and its effect, and what the user plugs in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardkit
from shardkit import AllGather, MixedPrecisionPolicy, ReduceScatter
from tests.parity.peers import grads, kinds, same_in_both
from tests.support.models import CASES, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import run_ranks

Library = Any


def grid(replicate: int, shard: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def mlp(lib: Library, **options: object) -> nn.Module:
    return CASES["mlp"].sharded(lib.fully_shard, **options)


def backward(model: nn.Module, number: int) -> Tensor:
    """Loss and gradients of the MLP's batch of that number."""
    loss = CASES["mlp"].loss(model, number)
    loss.backward()
    return loss


# ---------------------------------------------------------------- gathering


@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_forward(recurse: bool) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model, seen = mlp(lib), []
        for setting in (False, True):
            model.set_reshard_after_forward(setting, recurse=recurse)
            loss = CASES["mlp"].loss(model, rank)
            seen.append(kinds(model))
            loss.backward()
        return seen, kinds(model), grads(model)

    same_in_both(run)


@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_backward(recurse: bool) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model, seen = mlp(lib), []
        for setting in (False, True):
            model.set_reshard_after_backward(setting, recurse=recurse)
            backward(model, rank)
            seen.append(kinds(model))
        return seen, grads(model)

    same_in_both(run)


def test_set_unshard_in_backward_for_an_embedding() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = CASES["transformer"].build()
        lib.fully_shard(model.embed)
        for module in [*CASES["transformer"].units(model), model]:
            lib.fully_shard(module)
        model.embed.set_unshard_in_backward(False)
        CASES["transformer"].loss(model, rank).backward()
        return kinds(model), grads(model)

    same_in_both(run)


def test_explicit_prefetch_changes_no_number() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = CASES["transformer"].sharded(lib.fully_shard)
        first, second = model.blocks
        model.set_modules_to_forward_prefetch([first])
        first.set_modules_to_forward_prefetch([second])
        model.set_modules_to_backward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
        results = []
        for step in range(2):
            CASES["transformer"].loss(model, rank + 10 * step).backward()
            results.append(grads(model))
        return results

    same_in_both(run)


def test_set_post_optim_event_is_taken_once() -> None:
    def check(rank: int, world_size: int) -> None:
        model = mlp(shardkit)
        tree = shardkit.fully_shard.state(model).unit.tree
        event = torch.Event("cpu")
        model.set_post_optim_event(event)
        assert tree.post_optim_event is event
        backward(model, rank)
        assert tree.post_optim_event is None

    run_ranks(check, 1)


# ---------------------------------------------------------------- reducing


@pytest.mark.parametrize("recurse", [True, False])
def test_set_requires_gradient_sync(recurse: bool) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        model.set_requires_gradient_sync(False, recurse=recurse)
        backward(model, rank)
        results = [grads(model)]
        model.set_requires_gradient_sync(True)
        backward(model, rank + 10)
        return [*results, grads(model)]

    same_in_both(run)


def test_set_requires_all_reduce_keeps_partial_sums_out_of_the_gradients() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib, mesh=grid(2, 2))
        model.set_requires_all_reduce(False)
        backward(model, rank)
        results = [grads(model)]
        model.set_requires_all_reduce(True)
        backward(model, rank + 10)
        return [*results, grads(model)]

    same_in_both(run, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_divide_factor_with_sums_only(dtype: torch.dtype) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        results = []
        for factor in (1.0, 2.0, 3.0, 8.0):
            model = mlp(lib, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            for module in [*CASES["mlp"].units(model), model]:
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(factor)
            backward(model, rank)
            results.append(grads(model))
        return results

    same_in_both(run)


@pytest.mark.parametrize("sum_only", [True, False])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_divide_factor_holds_on_every_mesh(shape: tuple[int, int], sum_only: bool) -> None:
    """torch divides twice on (N, 1) with sums only, and has no such factor on gloo otherwise."""
    case = CASES["mlp"]

    def check(rank: int, world_size: int) -> None:
        expected = oracle_grads(case.build(), case.loss, world_size)
        for mesh in (grid(*shape), init_device_mesh("cpu", (2,))):
            for factor in (1.0, 0.5, 16.0):
                model = mlp(shardkit, mesh=mesh)
                for module in [*case.units(model), model]:
                    module.set_force_sum_reduction_for_comms(sum_only)
                    module.set_gradient_divide_factor(factor)
                backward(model, rank)
                assert_grads_equal(model, {n: g * 2 / factor for n, g in expected.items()}, world_size)

    run_ranks(check, 2)


def test_the_former_name_of_the_divide_factor() -> None:
    def check(rank: int, world_size: int) -> None:
        model = mlp(shardkit)
        model.set_reduce_scatter_divide_factor(4.0)
        assert shardkit.fully_shard.state(model).unit.settings.reduce.divide_factor == 4.0

    run_ranks(check, 1)


def test_unused_parameters_count_as_zero_where_asked() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        results = []
        for setting in (False, True):
            model = CASES["same_branch"].build()
            lib.fully_shard(model)
            model.set_reduce_scatter_unused_params(setting)
            CASES["same_branch"].loss(model, rank).backward()
            results.append(grads(model))
        return results

    same_in_both(run)


def test_ranks_may_use_different_parameters_where_asked() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = CASES["branch_by_rank"].build()
        lib.fully_shard(model)
        model.set_reduce_scatter_unused_params(True)
        CASES["branch_by_rank"].loss(model, rank).backward()
        return grads(model)

    same_in_both(run)


def test_scheduling_settings_change_no_number() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        results = []
        for prepare in (
            lambda model: model.set_reduce_scatter_max_input_buffers(3),
            lambda model: model.set_separate_reduce_scatter_group(),
            lambda model: model.set_is_last_backward(True),
        ):
            model = CASES["transformer"].sharded(lib.fully_shard)
            prepare(model)
            CASES["transformer"].loss(model, rank).backward()
            results.append(grads(model))
        return results

    same_in_both(run)


def test_max_input_buffers_can_be_set_after_the_first_forward() -> None:
    """torch ignores it then."""

    def check(rank: int, world_size: int) -> None:
        model = CASES["transformer"].sharded(shardkit.fully_shard)
        reductions = shardkit.fully_shard.state(model).unit.tree.reductions
        in_flight: dict[int, list[int]] = {1: [], 3: []}
        for limit, seen in in_flight.items():
            model.set_reduce_scatter_max_input_buffers(limit)

            def note(grad: Tensor, seen: list[int] = seen) -> None:
                seen.append(len(reductions._in_flight))

            handle = model.embed.register_forward_hook(
                lambda module, args, output, note=note: output.register_hook(note) and None
            )
            CASES["transformer"].loss(model, rank).backward()
            handle.remove()
        assert in_flight == {1: [1], 3: [2]}

    run_ranks(check, 2)


@pytest.mark.parametrize("value", [True, 1.0, "2", 0, -1])
def test_max_input_buffers_refuses_what_is_no_positive_int(value: object) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        try:
            mlp(lib).set_reduce_scatter_max_input_buffers(value)
        except (TypeError, ValueError) as error:
            return type(error).__name__
        return "taken"

    same_in_both(run, 1)


# ---------------------------------------------------------------- what the user plugs in


class CountingAllGather(AllGather):
    """torch's interface, over c10d's own call."""

    def __init__(self) -> None:
        self.num_calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.num_calls += 1
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class CountingReduceScatter(ReduceScatter):
    """torch's interface, over c10d's own call."""

    def __init__(self) -> None:
        self.num_calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.num_calls += 1
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def test_custom_collectives_are_called_as_often_and_give_the_same() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        gather, reduce = CountingAllGather(), CountingReduceScatter()
        model.layers[0].set_custom_all_gather(gather)
        model.layers[0].set_custom_reduce_scatter(reduce)
        losses = [backward(model, rank + 10 * step) for step in range(2)]
        return losses, grads(model), gather.num_calls, reduce.num_calls

    same_in_both(run)


def test_the_all_reduce_hook_changes_what_becomes_the_gradient() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model, seen = mlp(lib, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)), []

        def hook(reduced: Tensor) -> None:
            seen.append((reduced.ndim, reduced.dtype == torch.bfloat16))
            reduced.mul_(4)

        model.layers[1].set_all_reduce_hook(hook)
        backward(model, rank)
        return seen, grads(model)

    same_in_both(run)


def test_hybrid_sharding_by_an_all_reduce_hook() -> None:
    """Shards over pairs, and a hook that averages over the other axis, as users built it before HSDP."""

    def run(lib: Library, rank: int, world_size: int) -> object:
        mesh = grid(2, 2)
        model = mlp(lib, mesh=mesh["shard"])

        def hook(reduced: Tensor) -> None:
            dist.all_reduce(reduced, group=mesh["replicate"].get_group())
            reduced.div_(2)

        for module in [*CASES["mlp"].units(model), model]:
            module.set_all_reduce_hook(hook)
        backward(model, rank)
        return grads(model)

    same_in_both(run, 4)


def test_a_method_other_than_forward_gathers_too() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.enc, self.dec = nn.Linear(5, 7), nn.Linear(7, 5)

        def encode(self, x: Tensor) -> Tensor:
            return self.enc(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.dec(self.encode(x))

    def run(lib: Library, rank: int, world_size: int) -> object:
        model = Coder()
        lib.fully_shard(model)
        lib.register_fsdp_forward_method(model, "encode")
        lib.register_fsdp_forward_method(nn.Linear(1, 1), "not_there")  # not sharded: nothing happens
        model.encode(normal_batch(rank, 4, 5)).square().mean().backward()
        results = [kinds(model), grads(model)]
        model(normal_batch(rank, 4, 5)).square().mean().backward()
        try:
            lib.register_fsdp_forward_method(model, "not_there")
        except ValueError:
            return [*results, grads(model), "refused"]
        return results

    same_in_both(run)


def test_reset_iter_state_is_for_the_root_and_forgets_a_failure() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        backward(model, rank)
        try:
            model.layers[0].reset_iter_state()
        except RuntimeError:
            refused = True
        handle = model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            backward(model, rank)
        except ZeroDivisionError:
            model.reset_iter_state()
        handle.remove()
        model.zero_grad()
        backward(model, rank)
        return refused, kinds(model), grads(model)

    same_in_both(run)
