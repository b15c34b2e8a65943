"""Allocating and initialising what is on meta, and nothing else; equal replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit import (
    Blocks,
    CPUOffloadPolicy,
    allocate_,
    broadcast_replicas_,
    fully_shard,
    materialize_,
)
from shardkit._torch import local_of
from shardkit.collectives import count_traffic
from tests.parity.test_extensions import RoundedTensor
from tests.support.models import CASES, Transformer, normal_batch
from tests.support.ranks import errors_on_all_ranks, run_ranks


class Rotary(nn.Module):
    """A layer, a table that only the constructor computes, and counts that `reset_parameters` writes."""

    def __init__(self, table_device: str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.arange(4.0, device=table_device), persistent=False)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.num_resets = 0

    def reset_parameters(self) -> None:
        self.num_resets += 1
        nn.init.ones_(self.scale)
        self.counts.fill_(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table * self.scale


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return gathered


def assert_in_shard_buffers(model: nn.Module) -> None:
    """Every parameter's bytes lie inside its bucket's shard buffer, so that a gather sends them."""
    for unit in fully_shard.state(model).unit.tree.units:
        for bucket in unit.buckets:
            shard = bucket.gather.shard
            start = shard.flat.data_ptr()
            for param in bucket.params:
                assert param.registered is param.sharded and local_of(param.sharded) is param.local
                if param.local.numel():
                    assert start <= param.local.data_ptr() < start + shard.nbytes


# ---------------------------------------------------------------- materialize_


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sharded_meta_model_is_initialised_and_trains(world_size: int, ragged: bool) -> None:
    def check(rank: int, world_size: int) -> None:
        model = on_meta(Transformer)
        for module in (*model.blocks, model):
            fully_shard(module, shard_placement_fn=(lambda param: Blocks()) if ragged else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # holds the parameters from before
        torch.manual_seed(7)
        materialize_(model)
        assert_in_shard_buffers(model)
        weight = model.head.weight.full_tensor()
        assert 0 < weight.abs().max() <= 12**-0.5 and weight.std() > 0.1  # kaiming_uniform_ of a fan-in of 12
        assert torch.equal(model.norm.weight.full_tensor(), torch.ones(12))
        pieces = weight.chunk(world_size)
        assert all(not torch.equal(pieces[0][:5], piece[:5]) for piece in pieces[1:])
        case = CASES["transformer"]
        before = case.loss(model, rank)
        before.backward()
        optimizer.step()
        assert case.loss(model, rank) < before

    run_ranks(check, world_size)


def test_real_tensors_are_never_touched() -> None:
    def check(rank: int, world_size: int) -> None:
        model = Rotary()
        model.linear = on_meta(lambda: nn.Linear(4, 4))
        nn.init.constant_(model.scale, 3.0)
        fully_shard(model.linear)
        fully_shard(model)
        table, counts = model.table, model.counts
        materialize_(model)
        assert model.table is table and torch.equal(table, torch.arange(4.0))
        assert model.counts is counts and torch.equal(counts, torch.zeros(3, dtype=torch.int64))
        assert model.num_resets == 0  # it owned nothing on meta
        assert torch.equal(model.scale.full_tensor(), torch.full((4,), 3.0))
        assert_in_shard_buffers(model)
        assert not model(normal_batch(rank, 2, 4)).isnan().any()

    run_ranks(check, 2)


def test_modules_that_own_something_on_meta_are_reset_once_inner_ones_first() -> None:
    order: list[str] = []

    class Noted(nn.Linear):
        def __init__(self, name: str, inner: nn.Module | None = None) -> None:
            self.name = name
            super().__init__(4, 4)
            self.inner = inner

        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                order.append(self.name)
            super().reset_parameters()

    def check(rank: int, world_size: int) -> None:
        model = on_meta(lambda: Noted("outer", Noted("inner")))
        model.again = model.inner
        model.real = Noted("real")
        order.clear()
        fully_shard(model.real)
        fully_shard(model)
        materialize_(model)
        assert order == ["inner", "outer"]

    run_ranks(check, 2)


def test_a_tied_weight_is_initialised_by_its_first_owner_only() -> None:
    def check(rank: int, world_size: int) -> None:
        model = on_meta(lambda: Transformer(vocab=300, tied=True))
        fully_shard(model)
        materialize_(model)
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.full_tensor().abs().max() > 1  # normal as an embedding, not a uniform head
        assert_in_shard_buffers(model)

    run_ranks(check, 2)


def test_an_init_fn_takes_the_place_of_reset_parameters() -> None:
    def check(rank: int, world_size: int) -> None:
        model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        fully_shard(model)

        def constant(module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                param.data.fill_(0.5)  # leaves no trace on the version counter

        materialize_(model, init_fn=constant)
        assert all(
            torch.equal(p.full_tensor(), torch.full_like(p.full_tensor(), 0.5)) for p in model.parameters()
        )

    run_ranks(check, 2)


def test_a_table_that_nothing_recomputes_is_refused_by_name() -> None:
    def check(rank: int, world_size: int) -> None:
        materialize_(fully_shard(on_meta(lambda: Rotary("meta"))))

    errors_on_all_ranks(check, 2, ValueError, "['table'] were on meta", "build them on the CPU")


def test_a_module_without_reset_parameters_is_refused_before_anything_is_allocated() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.gain = nn.Parameter(torch.ones(2))

    def check(rank: int, world_size: int) -> None:
        model = fully_shard(on_meta(lambda: nn.Sequential(Bare())))
        try:
            materialize_(model)
        finally:
            assert all(param.is_meta for param in model.parameters())

    errors_on_all_ranks(check, 2, ValueError, "no reset_parameters: ['0 (Bare)']", "Pass init_fn")


def test_a_parameter_that_reset_parameters_forgets_is_refused_by_name() -> None:
    class Forgetful(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)

    def check(rank: int, world_size: int) -> None:
        materialize_(fully_shard(on_meta(lambda: nn.Sequential(Forgetful(4, 4)))))

    errors_on_all_ranks(check, 2, ValueError, "['0.bias'] were on meta")


def test_a_parameter_that_reset_parameters_replaces_by_a_plain_one_is_refused_by_name() -> None:
    class Replacing(nn.Linear):
        def reset_parameters(self) -> None:
            self.weight = nn.Parameter(torch.zeros(4, 4))

    def check(rank: int, world_size: int) -> None:
        materialize_(fully_shard(on_meta(lambda: nn.Sequential(Replacing(4, 4, bias=False)))))

    errors_on_all_ranks(check, 2, ValueError, "param '0.weight': expected a DTensor", "got a Parameter")


def test_what_no_unit_manages_is_materialised_too() -> None:
    def check(rank: int, world_size: int) -> None:
        model = on_meta(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2))
        )
        fully_shard(model, ignored_params=set(model[0].parameters()))
        torch.manual_seed(7)
        materialize_(model)
        assert not isinstance(model[0].weight, DTensor) and isinstance(model[2].in_proj_weight, DTensor)
        a, b = of_all_ranks(model[0].weight.detach())
        assert torch.equal(a, b) and a.std() > 0
        assert torch.equal(model[1].running_var, torch.ones(4)) and int(model[1].num_batches_tracked) == 0

    run_ranks(check, 2)


def test_a_tensor_subclass_stays_one() -> None:
    def check(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        model[0].weight = nn.Parameter(RoundedTensor(torch.empty(4, 4, device="meta")))
        fully_shard(model)

        def ones(layer: nn.Linear) -> None:
            nn.init.ones_(local_of(layer.weight).data_inside)

        materialize_(model, init_fn=ones)
        assert type(local_of(model[0].weight)) is RoundedTensor
        assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 4.0))

    run_ranks(check, 2)


def test_a_model_that_is_not_sharded_is_materialised_as_well() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    materialize_(model, "cpu")
    assert not any(param.is_meta or param.isnan().any() for param in model.parameters())


# ---------------------------------------------------------------- allocate_


def test_allocated_bytes_are_nan_until_a_state_dict_fills_them() -> None:
    def check(rank: int, world_size: int) -> None:
        source = fully_shard(CASES["tied"].build())
        model = on_meta(CASES["tied"].make)
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        allocated = allocate_(model)
        assert list(allocated) == [name for name, _ in model.named_parameters()]
        assert all(param.to_local().isnan().all() for param in model.parameters())
        assert_in_shard_buffers(model)
        model.load_state_dict(source.state_dict())
        for param, expected in zip(model.parameters(), source.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), expected.full_tensor())
        assert allocate_(model) == {}

    run_ranks(check, 2)


# ---------------------------------------------------------------- broadcast_replicas_


def test_replicas_get_the_first_ones_weights_in_one_broadcast_a_bucket() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(rank)
        model = Transformer()
        for module in (*model.blocks, model):
            fully_shard(module, mesh)
        model.unshard()
        mine = [param.to_local().detach().clone() for param in [*model.blocks.parameters()]]
        with count_traffic() as traffic:
            broadcast_replicas_(model)
        assert traffic.num_calls == {"broadcast": 3}
        for before, param in zip(mine, model.blocks.parameters(), strict=True):
            of_first_replica = of_all_ranks(before)[rank % 2]
            assert torch.equal(param.to_local(), of_first_replica)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "the replicas start from different weights"
            CASES["transformer"].loss(model, rank).backward()

    run_ranks(check, 4)


def test_nothing_is_sent_where_there_are_no_replicas() -> None:
    def check(rank: int, world_size: int) -> None:
        with count_traffic() as traffic:
            broadcast_replicas_(fully_shard(nn.Linear(4, 4)))
        assert not traffic.num_calls

    run_ranks(check, 2)


def test_replicas_on_meta_are_refused_by_name() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        broadcast_replicas_(fully_shard(on_meta(lambda: nn.Linear(4, 4)), mesh))

    errors_on_all_ranks(check, 2, ValueError, "['weight', 'bias'] are on meta", "materialize_")
