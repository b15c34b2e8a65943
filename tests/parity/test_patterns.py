"""Ways to run forward and backward that are not one after the other, each against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit import MixedPrecisionPolicy, fully_shard, share_comm_ctx
from shardkit.errors import UnevenUseError
from tests.support.models import CASES, MLP, Branchy, LoRALinear, branch_loss, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import errors_on_all_ranks, run_ranks

pytestmark = pytest.mark.usefixtures("both_layouts")

Loss = Callable[[nn.Module, int], Tensor]
SETTINGS = (True, False, None)


def x(rank: int, dim: int = 7) -> Tensor:
    return normal_batch(rank, 4, dim)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def shard_all(model: nn.Module, *names: str, **options: object) -> nn.Module:
    """`model` with the submodules `names`, then itself, as units."""
    for module in [*(model.get_submodule(name) for name in names), model]:
        fully_shard(module, **options)
    return model


def assert_trains(
    make: Callable[[], nn.Module],
    units: tuple[str, ...],
    loss: Loss,
    run: Callable[[nn.Module, int], object] | None = None,
    world_size: int = 2,
) -> None:
    """`run` on the sharded model gives the gradients that `loss.backward()` gives in one process, twice."""

    def check(rank: int, world_size: int) -> None:
        grads = oracle_grads(seeded(make), loss, world_size)
        for setting in SETTINGS:
            model = shard_all(seeded(make), *units, reshard_after_forward=setting)
            for _ in range(2):
                model.zero_grad()
                loss(model, rank).backward() if run is None else run(model, rank)
                # sums of several backwards are rounded in another order than one backward rounds them
                assert_grads_equal(model, grads, world_size if run is None else 3)

    run_ranks(check, world_size)


mlp = partial(MLP, 7, 9, 5, 7)  # the root keeps the last layer
MLP_UNITS = ("layers.0", "layers.1")


# ---------------------------------------------------------------- several forwards, several backwards


def test_two_forwards_before_two_backwards() -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(x(rank)).square().mean() + model(x(rank + 10)).sin().mean()

    def run(model: nn.Module, rank: int) -> None:
        first, second = model(x(rank)).square().mean(), model(x(rank + 10)).sin().mean()
        first.backward()
        second.backward()

    def run_reversed(model: nn.Module, rank: int) -> None:
        first, second = model(x(rank)).square().mean(), model(x(rank + 10)).sin().mean()
        second.backward()
        first.backward()

    for way in (None, run, run_reversed):
        assert_trains(mlp, MLP_UNITS, loss, way)


def test_a_forward_without_grad_between_forward_and_backward() -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        result = model(x(rank)).square().mean()
        with torch.no_grad():
            reference = model(x(rank + 10))
        return result * reference.mean()

    assert_trains(mlp, MLP_UNITS, loss)


def test_a_unit_that_runs_twice_in_one_forward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(7, 7), nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.outer(self.inner(x).tanh())).tanh()

    assert_trains(Twice, ("inner", "outer"), lambda model, rank: model(x(rank)).square().mean())


def test_two_backwards_over_one_graph_add_up() -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return 2 * model(x(rank)).square().mean()

    def run(model: nn.Module, rank: int) -> None:
        value = model(x(rank)).square().mean()
        value.backward(retain_graph=True)
        value.backward()

    assert_trains(mlp, MLP_UNITS, loss, run)


def test_the_second_of_two_outputs_alone_starts_backward() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.last(self.right(x).tanh())

    assert_trains(Fork, ("left", "right", "last"), lambda model, rank: model(x(rank))[1].square().mean())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_forward_may_be_without_grad(mode: Callable[[], torch.no_grad]) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        with mode():
            model(x(rank))
        return model(x(rank)).square().mean()

    assert_trains(mlp, MLP_UNITS, loss)


def test_one_rank_may_keep_outputs_that_others_drop() -> None:
    def check(rank: int, world_size: int) -> None:
        grads = oracle_grads(seeded(mlp), lambda m, r: m(x(r)).square().mean(), world_size)
        model, kept = shard_all(seeded(mlp), *MLP_UNITS), []
        for _ in range(3):
            output = model(x(rank))
            kept += [output] if rank == 0 else []
            del output
        model(x(rank)).square().mean().backward()
        assert_grads_equal(model, grads, world_size)

    run_ranks(check, 2)


# ---------------------------------------------------------------- gradients of gradients


def penalty(model: nn.Module, rank: int) -> Tensor:
    """A loss that holds the gradient of the output with respect to the input."""
    inputs = x(rank).requires_grad_()
    output = model(inputs)
    (grad,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return output.square().mean() + grad.square().sum()


def test_double_backward_through_freed_and_kept_units() -> None:
    assert_trains(mlp, MLP_UNITS, penalty)


def test_double_backward_as_torch_documents_it() -> None:
    def check(rank: int, world_size: int) -> None:
        model = shard_all(seeded(mlp), *MLP_UNITS, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        penalty(model, rank).backward()
        for module in (model.layers[0], model.layers[1], model):
            module.reshard()
        assert_grads_equal(model, oracle_grads(seeded(mlp), penalty, world_size), world_size)

    run_ranks(check, 2)


# ---------------------------------------------------------------- what backward starts from and passes by


class Keeps(nn.Module):
    """Leaves a tensor on itself for the loss, as auxiliary losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(7, 7) for _ in range(3))
        self.kept = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.middle(self.first(x).tanh())
        return self.last(self.kept)


@pytest.mark.parametrize("units", [(), ("middle",), ("first", "middle", "last")])
def test_the_loss_may_start_from_a_tensor_kept_on_the_module(units: tuple[str, ...]) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        model(x(rank))
        return model.kept.square().mean()

    assert_trains(Keeps, units, loss)


class Reshapes(nn.Module):
    """Returns a view of what it computed, of its input, or of its input's sum with what it computed."""

    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(7, 7), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x, self.linear(x))


class WritesToOutput(nn.Module):
    """Adds to its block's output in place, as residual streams do; a linear one of 3-D input is a view."""

    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(7, 7), Reshapes(way), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(self.before(x).tanh()[None])
        hidden += 1.0
        hidden *= 2.0
        return self.after(hidden)


VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, y: y,
    "rows": lambda x, y: y.sin()[0][1:],
    "turned": lambda x, y: y.sin().transpose(0, 1),
    "sum": lambda x, y: (x + y).view(-1, 7),
    "not_a_view": lambda x, y: y.sin(),
}


@pytest.mark.parametrize("way", VIEWS)
def test_an_output_that_is_a_view_may_be_written_to_in_place(way: str) -> None:
    make = partial(WritesToOutput, VIEWS[way])
    assert_trains(make, ("block", "after"), lambda model, rank: model(x(rank)).square().mean())
    assert_trains(make, ("block.linear", "block"), lambda model, rank: model(x(rank)).square().mean())


class Ignores(nn.Linear):
    """A frozen layer that is given an input it does not use."""

    def forward(self, used: Tensor, ignored: Tensor) -> Tensor:
        return super().forward(used)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.frozen, self.after = nn.Linear(7, 7), Ignores(7, 7), nn.Linear(7, 7)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        return self.after(self.frozen(x, hidden)) + hidden


def test_a_frozen_unit_that_ignores_an_input_with_a_gradient() -> None:
    assert_trains(Around, ("before", "frozen", "after"), lambda model, rank: model(x(rank)).square().mean())


@pytest.mark.parametrize("units", [(), ("even", "odd"), ("trunk", "even", "odd", "never")])
def test_branches_that_no_rank_takes_get_no_gradient(units: tuple[str, ...]) -> None:
    for branch in (0, 1):
        assert_trains(Branchy, units, branch_loss(lambda rank, branch=branch: branch))


def test_a_frozen_base_trains_its_adapters() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            LoRALinear(7, 5), nn.Tanh(), nn.Linear(5, 5).requires_grad_(False), LoRALinear(5, 3)
        )

    for units in ((), ("0", "2", "3"), ("0.base", "0", "3.base", "3")):
        assert_trains(make, units, lambda model, rank: model(x(rank)).square().mean(), world_size=3)


def test_parameters_frozen_and_unfrozen_between_steps() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def check(rank: int, world_size: int) -> None:
        def loss(model: nn.Module, rank: int) -> Tensor:
            return model(x(rank)).float().square().mean()

        for precision in (MixedPrecisionPolicy(), policy):
            reference = seeded(mlp)
            model = shard_all(seeded(mlp), "layers.0", mp_policy=precision)
            model.requires_grad_(False)
            model(x(rank))
            for trained in (("layers.0",), ("layers.0", "layers.1"), ("layers.1",), ("layers.0", "layers.1")):
                for net in (model, reference):
                    net.requires_grad_(False).zero_grad()
                    for name in trained:
                        net.get_submodule(name).requires_grad_(True)
                loss(model, rank).backward()
                dtypes = {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
                assert_grads_equal(model, oracle_grads(reference, loss, world_size, **dtypes), world_size)

    run_ranks(check, 2)


# ---------------------------------------------------------------- ranks that use different parameters


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_may_take_different_branches_with_the_opt_in(world_size: int) -> None:
    case = CASES["branch_by_rank"]

    def check(rank: int, world_size: int) -> None:
        grads = oracle_grads(case.build(), case.loss, world_size)
        never = {name: torch.zeros_like(p) for name, p in case.build().named_parameters() if "never" in name}
        model = case.build()
        fully_shard(model)
        model.set_reduce_scatter_unused_params(True)
        for _ in range(2):
            model.zero_grad()
            case.loss(model, rank).backward()
            assert_grads_equal(model, grads | never, world_size)

    run_ranks(check, world_size)


def test_ranks_that_take_different_branches_are_told_on_every_rank() -> None:
    def check(rank: int, world_size: int) -> None:
        model = CASES["branch_by_rank"].build()
        fully_shard(model)
        CASES["branch_by_rank"].loss(model, rank).backward()

    errors_on_all_ranks(
        check, 3, UnevenUseError, "even.weight", "odd.bias", "set_reduce_scatter_unused_params(True)"
    )


# ---------------------------------------------------------------- activation checkpointing


class Recomputes(nn.Module):
    """Checkpoints its two layers, from inside: the units run within the recomputation."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.use_reentrant = use_reentrant

    def inner(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).sin()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("units", [(), ("first", "second")])
def test_checkpointing_inside_a_unit(units: tuple[str, ...], use_reentrant: bool) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(x(rank).requires_grad_()).square().mean()

    assert_trains(partial(Recomputes, use_reentrant), units, loss)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_around_units_and_the_root(use_reentrant: bool) -> None:
    def around_units(model: nn.Module, rank: int) -> Tensor:
        hidden = x(rank).requires_grad_()
        for layer in model.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
        return hidden.square().mean()

    def around_root(model: nn.Module, rank: int) -> Tensor:
        return checkpoint(model, x(rank).requires_grad_(), use_reentrant=use_reentrant).square().mean()

    def several(model: nn.Module, rank: int) -> Tensor:
        return around_root(model, rank) + around_root(model, rank + 10)

    assert_trains(mlp, (*MLP_UNITS, "layers.2"), around_units)
    assert_trains(mlp, MLP_UNITS, around_root)
    assert_trains(mlp, MLP_UNITS, several, lambda model, rank: several(model, rank).backward())


# ---------------------------------------------------------------- list units, ties, several trees


class Chunked(nn.Module):
    """The head is not part of forward: the loss calls it by chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm, self.head = nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.trunk(x))


def test_a_list_unit_runs_piece_by_piece() -> None:
    def check(rank: int, world_size: int) -> None:
        def loss(model: nn.Module, rank: int) -> Tensor:
            return model.head(model(x(rank))).square().sum()

        model = seeded(Chunked)
        fully_shard([model.norm, model.head])
        fully_shard(model)
        for _ in range(2):
            model.zero_grad()
            hidden = model(x(rank))
            cut = hidden.detach().requires_grad_()
            for chunk in cut.chunk(2):
                model.head(chunk).square().sum().backward()
            hidden.backward(cut.grad)
            assert_grads_equal(model, oracle_grads(seeded(Chunked), loss, world_size), 3)

    run_ranks(check, 2)


def test_tied_parameters_of_a_unit_stay_one_parameter() -> None:
    case = CASES["tied"]

    def check(rank: int, world_size: int) -> None:
        model = case.sharded(fully_shard)
        assert model.embed.weight is model.head.weight
        loss = case.loss(model, rank)
        assert model.embed.weight is model.head.weight
        loss.backward()
        assert_grads_equal(model, oracle_grads(case.build(), case.loss, world_size), world_size)

    run_ranks(check, 3)


def test_two_trees_train_in_one_loss() -> None:
    """As a generator and a critic do; they may also share their streams."""

    def loss(pair: nn.ModuleList, rank: int) -> Tensor:
        generator, critic = pair
        return critic(generator(x(rank))).square().mean() + critic(x(rank + 10)).mean()

    def check(rank: int, world_size: int) -> None:
        grads = oracle_grads(seeded(lambda: nn.ModuleList([mlp(), mlp()])), loss, world_size)
        for share in (False, True):
            pair = seeded(lambda: nn.ModuleList([mlp(), mlp()]))
            for model in pair:
                shard_all(model, *MLP_UNITS)
            if share:
                share_comm_ctx(list(pair))
            for _ in range(2):
                pair.zero_grad()
                loss(pair, rank).backward()
                assert_grads_equal(pair, grads, world_size)

    run_ranks(check, 2)
