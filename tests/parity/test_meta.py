"""Sharding on the meta device, initialising or loading afterwards, and casts of a sharded model."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit import MixedPrecisionPolicy, distribute_tensor, fully_shard
from tests.support.models import CASES, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("both_layouts")


def grid(replicate: int, shard: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def flat(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def linears(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def sharded_on_meta(mesh: DeviceMesh, make: Callable[[], nn.Module], **options: object) -> nn.Module:
    with torch.device("meta"):
        model = make()
    for child in model.children():
        fully_shard(child, mesh, **options)
    return fully_shard(model, mesh, **options)


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    """Each rank's tensor."""
    gathered = [tensor] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor)
    return gathered


# ---------------------------------------------------------------- initialising


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_are_initialised_with_numbers_of_their_own(world_size: int) -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded_on_meta(flat(world_size), lambda: linears(16, 6 * world_size, 12))
        assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        for layer in model:
            layer.reset_parameters()
        weight = model[0].weight.full_tensor()
        assert weight.abs().max() <= 1 / 4 and weight.std() > 0.1
        pieces = weight.chunk(world_size)
        for index, piece in enumerate(pieces):
            assert all(not torch.equal(piece, other) for other in pieces[:index])
        assert not torch.equal(weight[0], model[1].weight.full_tensor()[0, :16])

    run_ranks(check, world_size)


def test_replicas_are_initialised_alike_and_shards_are_not() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded_on_meta(grid(2, 2), lambda: linears(8, 8))
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        nn.init.normal_(model[0].weight)
        nn.init.trunc_normal_(model[0].bias)
        for param in model.parameters():
            a, b, c, d = of_all_ranks(param.to_local().detach())
            assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)
        model(normal_batch(rank, 4, 8)).mean().backward()  # warns where replicas differ

    run_ranks(check, 4)


def test_a_seed_gives_the_same_numbers_again_and_the_generator_moves_on() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded_on_meta(flat(world_size), lambda: linears(8, 8))
        model.to_empty(device="cpu")
        draws = []
        for _ in range(2):
            torch.manual_seed(7)
            for _ in range(2):
                nn.init.normal_(model[0].weight)
                draws.append(model[0].weight.full_tensor().clone())
        assert torch.equal(draws[0], draws[2]) and torch.equal(draws[1], draws[3])
        assert not torch.equal(draws[0], draws[1])
        a, b = of_all_ranks(torch.rand(3))
        assert torch.equal(a, b)  # and what is drawn outside DTensors stays the same on all ranks

    run_ranks(check, 2)


def test_a_model_built_on_meta_trains_as_one_that_was_not() -> None:
    case = CASES["mlp"]

    def check(rank: int, world_size: int) -> None:
        with torch.device("meta"):
            model = case.make()
        for module in [*case.units(model), model]:
            fully_shard(module)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param, value in zip(model.parameters(), case.build().parameters(), strict=True):
                param.copy_(distribute_tensor(value, param.device_mesh, param.placements))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        case.loss(model, rank).backward()
        grads = oracle_grads(case.build(), case.loss, world_size)
        assert_grads_equal(model, grads, world_size)
        optimizer.step()
        for (name, param), value in zip(model.named_parameters(), case.build().parameters(), strict=True):
            assert torch.equal(param.full_tensor(), value.detach().sub(grads[name], alpha=0.1))

    run_ranks(check, 2)


# ---------------------------------------------------------------- loading onto meta


def test_assigning_a_sharded_state_dict_onto_meta() -> None:
    case = CASES["transformer"]

    def check(rank: int, world_size: int) -> None:
        source = case.sharded(fully_shard)
        state = {name: value.clone() for name, value in source.state_dict().items()}
        with torch.device("meta"):
            model = case.make()
        for module in [*case.units(model), model]:
            fully_shard(module)
        for part in (0, 1):  # piecewise, as checkpoints come in several files
            some = {name: value for i, (name, value) in enumerate(state.items()) if i % 2 == part}
            model.load_state_dict(some, assign=True, strict=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            case.loss(model, rank).backward()
        assert_grads_equal(model, oracle_grads(case.build(), case.loss, world_size), world_size)
        before = model.head.weight.full_tensor().clone()
        optimizer.step()
        assert not torch.equal(model.head.weight.full_tensor(), before)
        with torch.no_grad():
            assert case.loss(model, rank) < case.loss(source, rank)

    run_ranks(check, 2)


class Rotary(nn.Module):
    """A table that no checkpoint holds: non-persistent, computed when the module is built."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table


def test_a_real_buffer_beside_meta_parameters_survives_assignment() -> None:
    def check(rank: int, world_size: int) -> None:
        source = fully_shard(Rotary())
        model = Rotary()
        with torch.device("meta"):
            model.linear = nn.Linear(4, 4)
        fully_shard(model)
        model.load_state_dict(source.state_dict(), assign=True)
        assert torch.equal(model.table, torch.arange(4.0))
        assert torch.equal(model(torch.ones(1, 4)), source(torch.ones(1, 4)))

    run_ranks(check, 2)


# ---------------------------------------------------------------- casts


@pytest.mark.parametrize("swap", [False, True])
def test_a_cast_after_sharding_is_taken_in(swap: bool) -> None:
    case = CASES["mlp"]

    def cast_reference(dtype: torch.dtype) -> nn.Module:
        return case.build().to(dtype)

    def loss_in(dtype: torch.dtype) -> Callable[[nn.Module, int], Tensor]:
        return lambda model, rank: model(normal_batch(rank, 4, 7).to(dtype)).float().square().mean()

    def check(rank: int, world_size: int) -> None:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        model = case.sharded(fully_shard)
        case.loss(model, rank).backward()
        model.zero_grad()
        for dtype in (torch.bfloat16, torch.float64):
            model = case.sharded(fully_shard)
            case.loss(model, rank).backward()
            model.zero_grad()
            model.to(dtype)
            assert all(p.dtype == dtype and p.to_local().dtype == dtype for p in model.parameters())
            for _ in range(2):
                model.zero_grad()
                loss_in(dtype)(model, rank).backward()
                reference = oracle_grads(cast_reference(dtype), loss_in(dtype), world_size)
                assert_grads_equal(model, reference, world_size)

    run_ranks(check, 2)


def test_a_policy_is_resolved_after_a_cast() -> None:
    """Built in float32, cast to bfloat16: computed in bfloat16, still reduced in float32."""
    case = CASES["mlp"]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(normal_batch(rank, 4, 7).bfloat16()).float().square().mean()

    def check(rank: int, world_size: int) -> None:
        model = case.sharded(fully_shard, mp_policy=policy).to(torch.bfloat16)
        loss(model, rank).backward()
        expected = oracle_grads(case.build().to(torch.bfloat16), loss, world_size, reduce_dtype=torch.float32)
        assert_grads_equal(model, expected, world_size)

    run_ranks(check, 2)


def test_casts_in_the_middle_of_training_keep_optimizer_and_values() -> None:
    def check(rank: int, world_size: int) -> None:
        model = CASES["few_rows"].sharded(fully_shard)
        before = [param.full_tensor().clone() for param in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        CASES["few_rows"].loss(model, rank)  # the root is left gathered
        model.double()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.full_tensor(), value.double())
        model.float()
        CASES["few_rows"].loss(model, rank).backward()
        optimizer.step()
        for param, value in zip(model.parameters(), before, strict=True):
            assert not torch.equal(param.full_tensor(), value)

    run_ranks(check, 3)
