"""Parameters and buffers of every kind: trained right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import MixedPrecisionPolicy, fully_shard
from tests.support.models import normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import errors_on_all_ranks, run_ranks

pytestmark = pytest.mark.usefixtures("both_layouts")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Bag(nn.Module):
    """Parameters used elementwise: each rank's gradient is its own random numbers."""

    def __init__(self, *params: Tensor) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, number: int) -> Tensor:
        return sum(term(param, number + index) for index, param in enumerate(self.params))


def term(param: Tensor, number: int) -> Tensor:
    if not param.requires_grad:
        return param.to(torch.float32).sum()
    weights = torch.randn(param.shape, dtype=param.dtype, generator=torch.Generator().manual_seed(number))
    return (param * weights).sum().abs().float()


def bag_loss(model: nn.Module, rank: int) -> Tensor:
    return model(100 * rank)


def randn(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    return nn.Parameter((values * 50).to(dtype), requires_grad=trained)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def assert_trains(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module, int], Tensor], world: int
) -> None:
    """The gradients of one process, in a step and in the next; values survive being sharded."""

    def check(rank: int, world_size: int) -> None:
        grads = oracle_grads(seeded(make), loss, world_size)
        model = seeded(make)
        fully_shard(model)
        for (name, param), expected in zip(model.named_parameters(), seeded(make).parameters(), strict=True):
            assert torch.equal(param.full_tensor(), expected), f"{name} changed when it was sharded"
        for _ in range(2):
            model.zero_grad()
            loss(model, rank).backward()
            assert_grads_equal(model, grads, world_size)

    run_ranks(check, world)


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_wide_and_complex_parameters(dtype: torch.dtype) -> None:
    for world_size in (1, 2, 3):
        assert_trains(lambda: Bag(randn(5, 2, dtype=dtype), randn(3, dtype=dtype)), bag_loss, world_size)


def test_complex_parameters_are_left_alone_by_a_precision_policy() -> None:
    def check(rank: int, world_size: int) -> None:
        def make() -> nn.Module:
            return Bag(randn(5, 2, dtype=torch.complex64))

        model = make()
        fully_shard(model, mp_policy=BF16)
        bag_loss(model, rank).backward()
        assert_grads_equal(model, oracle_grads(make(), bag_loss, world_size), world_size)

    run_ranks(check, 2)


INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_integer_parameters_are_gathered_as_they_are(dtype: torch.dtype) -> None:
    def check(rank: int, world_size: int) -> None:
        for policy in (MixedPrecisionPolicy(), BF16):
            model = Bag(randn(7, 3, dtype=dtype, trained=False), randn(4, dtype=dtype, trained=False))
            expected = [param.clone() for param in model.parameters()]
            fully_shard(model, mp_policy=policy)
            model.unshard()
            for param, value in zip(model.parameters(), expected, strict=True):
                assert not isinstance(param, DTensor)
                assert torch.equal(param, value)
            model.reshard()
            assert all(p.to_local().dtype == dtype for p in model.parameters())

    run_ranks(check, 3)


def test_every_dtype_in_one_unit() -> None:
    def make() -> nn.Module:
        trained = [
            randn(5, 2, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        ]
        stored = [randn(3, 4, dtype=d, trained=False) for d in (torch.uint8, torch.int64, torch.float32)]
        return Bag(*trained, *stored, randn(6, dtype=torch.complex64), randn(9))

    assert_trains(make, bag_loss, 2)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("world_size", [3, 4])
def test_shapes_from_nothing_to_five_dims(world_size: int) -> None:
    shapes = [(1,), (1, 1), (2, 5), (0,), (0, 3), (4, 0), (3, 1, 2), (5, 2, 1, 2), (1, 2, 2, 1, 3), (16, 16)]
    assert_trains(lambda: Bag(*(randn(*shape) for shape in shapes)), bag_loss, world_size)


def test_a_unit_of_one_element_leaves_the_other_ranks_empty() -> None:
    def check(rank: int, world_size: int) -> None:
        model = Bag(randn(1))
        fully_shard(model)
        assert model.params[0].to_local().shape == ((1,) if rank == 0 else (0,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            bag_loss(model, rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert model.params[0].full_tensor().isfinite().all()

    run_ranks(check, 4)


def test_a_module_without_parameters_and_one_whose_units_have_them_all() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Identity(), nn.Linear(4, 3))

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(normal_batch(rank, 4, 5)).square().mean()

    def check(rank: int, world_size: int) -> None:
        model = seeded(make)
        for module in (model[0], model[1], model[2], model):
            fully_shard(module)
        for _ in range(2):
            model.zero_grad()
            loss(model, rank).backward()
            assert_grads_equal(model, oracle_grads(seeded(make), loss, world_size), world_size)

    run_ranks(check, 2)


# ---------------------------------------------------------------- modules that keep them in other ways


def test_absent_parameters_lists_dicts_and_parametrizations() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(5, 4, bias=False)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.scales = nn.ParameterDict({"a": torch.ones(4), "b": torch.full((4,), 2.0)})
            self.register_parameter("nothing", None)

        def forward(self, x: Tensor) -> Tensor:
            return self.normed(self.plain(x)) * self.scales["a"] + self.scales["b"]

    assert_trains(Odd, lambda model, rank: model(normal_batch(rank, 4, 5)).square().mean(), 2)


def test_sparse_gradients_of_an_embedding() -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(torch.tensor([1, rank, 5, 1])).sin().sum()

    def check(rank: int, world_size: int) -> None:
        dense = oracle_grads(seeded(lambda: nn.Embedding(7, 3)), loss, world_size)
        model = seeded(lambda: nn.Embedding(7, 3, sparse=True))
        fully_shard(model)
        loss(model, rank).backward()
        assert_grads_equal(model, dense, world_size)

    run_ranks(check, 2)


def test_buffers_keep_their_dtype_and_are_not_sharded() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
            self.register_buffer("table", torch.arange(4.0, dtype=torch.float64), persistent=False)
            self.register_buffer("mask", torch.tensor([True, False, True, True]))

        def forward(self, x: Tensor) -> Tensor:
            x = F.batch_norm(
                self.linear(x).float(), self.norm.running_mean, self.norm.running_var, training=True
            )
            self.norm.num_batches_tracked.add_(1)
            return x * self.mask * self.table

    def check(rank: int, world_size: int) -> None:
        model, plain = seeded(Normed), seeded(Normed)
        fully_shard(model.norm, mp_policy=BF16)
        fully_shard(model, mp_policy=BF16)
        model(normal_batch(rank, 6, 5)).mean().backward()
        for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert not isinstance(buffer, DTensor), name
            assert (buffer.dtype, buffer.shape) == (expected.dtype, expected.shape), name
        assert model.norm.num_batches_tracked == 1
        assert torch.equal(model.table, plain.table)
        assert list(model.state_dict()) == list(plain.state_dict())

    run_ranks(check, 2)


# ---------------------------------------------------------------- refused by name


def test_a_parameter_added_after_sharding_is_refused_on_every_rank() -> None:
    def on_a_unit(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        fully_shard(model)
        model(normal_batch(rank, 2, 5)).mean().backward()
        model[0].adapter = nn.Parameter(torch.ones(4))
        model(normal_batch(rank, 2, 5))

    def as_a_module(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        fully_shard(model[0])
        fully_shard(model)
        model.append(nn.Linear(3, 2))
        model(normal_batch(rank, 2, 5))

    errors_on_all_ranks(on_a_unit, 2, ValueError, "'0.adapter'", "after fully_shard", "ignored_params")
    errors_on_all_ranks(as_a_module, 2, ValueError, "'2.weight'", "call fully_shard on its module")


def test_an_adapter_that_is_sharded_later_or_frozen_is_welcome() -> None:
    def check(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        fully_shard(model)
        model[0].scale = nn.Parameter(torch.ones(4), requires_grad=False)
        model(normal_batch(rank, 2, 5))

    run_ranks(check, 2)


def test_a_submodule_under_two_sharded_parents_is_refused_on_every_rank() -> None:
    def check(rank: int, world_size: int) -> None:
        shared = nn.Linear(4, 4)
        model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Linear(4, 4), shared))
        fully_shard(model[0])
        fully_shard(model[1])

    errors_on_all_ranks(check, 2, ValueError, "1.weight", "0.weight", "fully_shard([module_a, module_b])")


def test_parameters_tied_across_units_are_refused_on_every_rank() -> None:
    def check(rank: int, world_size: int) -> None:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        fully_shard(model["embed"])
        fully_shard(model["head"])

    errors_on_all_ranks(check, 2, ValueError, "weight", "another fully_shard unit", "[module_a, module_b]")
