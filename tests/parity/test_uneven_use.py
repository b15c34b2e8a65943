"""Ranks whose losses use different units: every rank gathers and reduces the same ones in the same order.

All ranks run all units forward, as experts that may get no tokens do; the loss takes what it likes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardkit import fully_shard
from shardkit.collectives import count_traffic
from shardkit.errors import CollectiveTimeoutError
from tests.support.models import normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import errors_on_all_ranks, run_ranks

pytestmark = pytest.mark.usefixtures("both_layouts")

DIM, NUM_EXPERTS, NUM_LAYERS = 7, 3, 2
Way = Callable[[nn.Module, Tensor], Tensor]


class Experts(nn.Module):
    """All experts run; the sum of the chosen ones is what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x: Tensor, chosen: tuple[int, ...], way: Way) -> Tensor:
        outputs = [way(expert, x) for expert in self.experts]
        return torch.stack([outputs[index] for index in chosen]).sum(0)


class MoE(nn.Module):
    """Layers of experts between dense ones; without `stem` the first experts' inputs need no gradient."""

    def __init__(self, *, stem: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM) if stem else nn.Identity()
        self.layers = nn.ModuleList(Experts() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, chosen: list[tuple[int, ...]], way: Way) -> Tensor:
        x = self.stem(x)
        for layer, of_layer in zip(self.layers, chosen, strict=True):
            x = layer(x, of_layer, way)
        return self.head(x)


def call(expert: nn.Module, x: Tensor) -> Tensor:
    return expert(x)


def call_twice(expert: nn.Module, x: Tensor) -> Tensor:
    return expert(expert(x))


def recompute(expert: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(expert, x, use_reentrant=False)


def reenter(expert: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(expert, x, use_reentrant=True) if x.requires_grad else expert(x)


WAYS = (call, call_twice, recompute, reenter)


def seeded(*, stem: bool) -> MoE:
    torch.manual_seed(1)
    return MoE(stem=stem)


def sharded(stem: bool, shape: tuple[int, ...], setting: bool | None) -> MoE:
    """Every expert, every layer and the model are units."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = seeded(stem=stem)
    for module in (*(e for layer in model.layers for e in layer.experts), *model.layers, model):
        fully_shard(module, mesh, reshard_after_forward=setting)
    return model


def choices(seed: int) -> Iterator[list[tuple[int, ...]]]:
    """What one rank's loss takes: one to all experts of each layer."""
    draw = random.Random(seed)
    while True:
        yield [
            tuple(draw.sample(range(NUM_EXPERTS), draw.randint(1, NUM_EXPERTS))) for _ in range(NUM_LAYERS)
        ]


def loss_of(step: int, way: Way) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, rank: int) -> Tensor:
        chosen = next(choices(100 * step + rank))
        return model(normal_batch(rank, 4, DIM), chosen, way).square().mean()

    return loss


def grads_or_zeros(
    reference: MoE, loss: Callable[[nn.Module, int], Tensor], world_size: int
) -> dict[str, Tensor]:
    """What one process computes; zeros of what no rank's loss uses."""
    zeros = {name: torch.zeros_like(param) for name, param in reference.named_parameters()}
    return zeros | oracle_grads(reference, loss, world_size)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("stem", [True, False])
def test_ranks_may_use_different_units_with_the_opt_in(stem: bool, shape: tuple[int, ...]) -> None:
    def check(rank: int, world_size: int) -> list[list[tuple[str, int]]]:
        reference, traffics = seeded(stem=stem), []
        for setting in (True, None):
            model = sharded(stem, shape, setting)
            model.set_reduce_scatter_unused_params(True)
            for step, way in enumerate(WAYS):
                loss = loss_of(step, way)
                grads = grads_or_zeros(reference, loss, world_size)
                model.zero_grad()
                with count_traffic() as traffic:
                    loss(model, rank).backward()
                assert_grads_equal(model, grads, 3)
                traffics.append(sorted(traffic.num_calls.items()))
        return traffics

    first, *others = run_ranks(check, torch.Size(shape).numel())
    assert all(other == first for other in others), "ranks took part in different collectives"


class Skipped(nn.Module):
    """Checkpointed layers of experts that are no units themselves; the loss takes the outputs of some."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Experts() for _ in range(NUM_LAYERS))
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: Tensor, chosen: list[tuple[int, ...]], way: Way) -> list[Tensor]:
        h, outputs = self.stem(x), []

        def run(index: int, h: Tensor) -> Tensor:
            """Backward recomputes layer 0 when it comes to an expert, layer 1 before that."""
            factor = self.frozen(x).sin()
            layer = self.layers[index]
            if index == 0:
                return layer(h * factor, chosen[index], way)
            return layer(h, chosen[index], way) * factor

        for index in range(NUM_LAYERS):
            outputs.append(checkpoint(run, index, h, use_reentrant=self.use_reentrant))
            h = h + outputs[-1].tanh()
        return outputs


def seeded_skipped(*, use_reentrant: bool) -> Skipped:
    torch.manual_seed(1)
    return Skipped(use_reentrant=use_reentrant)


def sharded_skipped(use_reentrant: bool, mesh: DeviceMesh, setting: bool | None) -> Skipped:
    model = seeded_skipped(use_reentrant=use_reentrant)
    first, *others = [list(layer.experts) for layer in model.layers]
    for modules in (first[:2], *first[2:], *chain.from_iterable(others), model.frozen, model):
        fully_shard(modules, mesh, reshard_after_forward=setting)
    model.set_reduce_scatter_unused_params(True)
    return model


def loss_of_some(step: int, way: Way) -> Callable[[nn.Module, int], Tensor]:
    """The output of the last layer, of the first, or of both."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        draw = random.Random(f"{step}, {rank}")
        outputs = model(normal_batch(rank, 4, DIM), next(choices(100 * step + rank)), way)
        taken = draw.sample(outputs, draw.randint(1, NUM_LAYERS))
        return torch.stack([output.square().mean() for output in taken]).sum()

    return loss


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_ranks_may_leave_out_a_checkpointed_layer_that_holds_units(
    shape: tuple[int, ...], use_reentrant: bool
) -> None:
    """What some ranks recompute, the others gather as well, whichever of its units they come to first."""

    def check(rank: int, world_size: int) -> list[list[tuple[str, int]]]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        reference, traffics = seeded_skipped(use_reentrant=use_reentrant), []
        for setting in (True, None):
            model = sharded_skipped(use_reentrant, mesh, setting)
            for step, way in enumerate((*WAYS, reenter, reenter)):
                loss = loss_of_some(step, way)
                grads = grads_or_zeros(reference, loss, world_size)
                model.zero_grad()
                with count_traffic() as traffic:
                    loss(model, rank).backward()
                trained = {n: g for n, g in (grads).items() if not n.startswith("frozen")}
                assert_grads_equal(model, trained, 3)
                traffics.append(sorted(traffic.num_calls.items()))
        return traffics

    first, *others = run_ranks(check, torch.Size(shape).numel())
    assert all(other == first for other in others), "ranks took part in different collectives"


def test_micro_batches_may_use_different_units_with_the_opt_in() -> None:
    """Two forwards, then their backwards in either order, without sync and with."""

    def check(rank: int, world_size: int) -> None:
        def both(model: nn.Module, rank: int) -> Tensor:
            return loss_of(0, call)(model, rank) + loss_of(1, call)(model, rank)

        grads = oracle_grads(seeded(stem=True), both, world_size)
        model = sharded(True, (world_size,), True)
        model.set_reduce_scatter_unused_params(True)
        for order in (1, -1):
            for syncs_first in (True, False):
                model.zero_grad()
                losses = [loss_of(step, call)(model, rank) for step in (0, 1)][::order]
                model.set_requires_gradient_sync(syncs_first)
                losses[0].backward()
                model.set_requires_gradient_sync(True)
                losses[1].backward()
                for name, param in model.named_parameters():
                    grads.setdefault(name, torch.zeros(param.shape))
                assert_grads_equal(model, grads, 3)

    run_ranks(check, 3)


def test_one_backward_may_follow_forwards_that_use_different_units() -> None:
    """What a rank did not use of the later forward comes before the earlier one on every rank."""

    def check(rank: int, world_size: int) -> None:
        def both(model: nn.Module, rank: int) -> Tensor:
            return loss_of(0, call)(model, rank) + loss_of(1, call)(model, rank)

        reference = seeded(stem=False)
        grads = grads_or_zeros(reference, both, world_size)
        for setting in (True, None):
            model = sharded(False, (world_size,), setting)
            model.set_reduce_scatter_unused_params(True)
            for _ in range(2):
                model.zero_grad()
                both(model, rank).backward()
                assert_grads_equal(model, grads, 3)

    run_ranks(check, 3, timeout=60)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loss_may_use_nothing_of_some_forwards(world_size: int) -> None:
    """Of three forwards before one backward: rank 0 uses the first, rank 1 two, rank 2 the second."""

    def check(rank: int, world_size: int) -> list[list[tuple[str, int]]]:
        def some(model: nn.Module, rank: int) -> Tensor:
            losses = [loss_of(step, recompute)(model, rank) for step in range(3)]
            return sum([losses[step] for step in [(0,), (0, 1), (1,)][rank]], torch.zeros(()))

        reference, traffics = seeded(stem=True), []
        grads = grads_or_zeros(reference, some, world_size)
        for setting in (True, None):
            model = sharded(True, (world_size,), setting)
            model.set_reduce_scatter_unused_params(True)
            for _ in range(2):
                model.zero_grad()
                with count_traffic() as traffic:
                    some(model, rank).backward()
                assert_grads_equal(model, grads, 3)
                traffics.append(sorted(traffic.num_calls.items()))
        return traffics

    first, *others = run_ranks(check, world_size, timeout=90)
    assert all(other == first for other in others), "ranks took part in different collectives"


def test_ranks_ask_one_another_only_where_several_forwards_wait() -> None:
    def check(rank: int, world_size: int) -> list[int]:
        model = sharded(True, (world_size,), True)
        model.set_reduce_scatter_unused_params(True)
        asked = []
        for num_forwards in (1, 1, 2, 1):  # the second is left by all, and forgotten by the next forward
            with count_traffic() as traffic:
                loss, *_ = [loss_of(step, call)(model, rank) for step in range(num_forwards)]
                loss.backward()
            asked.append(traffic.num_calls["all_reduce"])
        return asked

    begin_and_end = 2
    assert run_ranks(check, 2) == [[0, 0, begin_and_end, 0]] * 2


def test_ranks_that_use_different_units_are_told_of_the_opt_in() -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(True, (world_size,), True)
        chosen = [(rank,), (rank,)]
        model(normal_batch(rank, 4, DIM), chosen, call).square().mean().backward()

    words = (
        "unit 'layers.1.experts.",
        "whose loss used other units",
        "set_reduce_scatter_unused_params(True)",
    )
    errors_on_all_ranks(check, 2, CollectiveTimeoutError, *words, group_timeout=5.0)
