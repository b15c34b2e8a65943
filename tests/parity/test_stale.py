"""Weights and their gathered copies: every change is seen by the next forward, none is lost in silence.

Also what happens after an exception that the caller catches: the next iterations are right.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardkit import fully_shard
from shardkit.errors import GatheredParamError
from tests.support.models import CASES, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import errors_on_all_ranks, run_ranks

pytestmark = pytest.mark.usefixtures("both_layouts")

CASE = CASES["mlp"]
Change = Callable[[nn.Module], object]


def x(rank: int) -> Tensor:
    return normal_batch(rank, 4, 7)


def mlp(**options: object) -> nn.Module:
    return CASE.sharded(fully_shard, **options)


def units_of(model: nn.Module) -> list[nn.Module]:
    return [*CASE.units(model), model]


# ---------------------------------------------------------------- changes


def step(make: Callable[..., torch.optim.Optimizer], **options: object) -> Change:
    """A step with gradients that are the same sharded and not."""

    def change(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        make(model.parameters(), lr=0.1, **options).step()
        model.zero_grad()

    return change


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


@torch.no_grad()
def swap_with_average(model: nn.Module) -> None:
    """Put averages in the weights' place, to evaluate them, by a call that no optimizer step announces."""
    params = list(model.parameters())
    averages = [param * 0.5 for param in params]
    torch._foreach_lerp_(params, averages, 1.0)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def assign(model: nn.Module) -> None:
    halved = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(halved, assign=True)


CHANGES: dict[str, Change] = {
    "sgd": step(torch.optim.SGD),
    "sgd_foreach": step(torch.optim.SGD, foreach=True),
    "adamw_fused": step(torch.optim.AdamW, fused=True),
    "adamw_foreach": step(torch.optim.AdamW, foreach=True),
    "in_place": in_place,
    "swap": swap_with_average,
    "load": load,
    "assign": assign,
}


def forward_only(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model(x(rank))


def inference(model: nn.Module, rank: int) -> None:
    with torch.inference_mode():
        model(x(rank))


def forward_and_backward(model: nn.Module, rank: int) -> None:
    CASE.loss(model, rank).backward()
    model.zero_grad()


def backward_and_evaluation(model: nn.Module, rank: int) -> None:
    forward_and_backward(model, rank)
    forward_only(model, rank)


BEFORE = (forward_only, inference, forward_and_backward, backward_and_evaluation)


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_forward_sees_a_change(change: str) -> None:
    def check(rank: int, world_size: int) -> None:
        reference = CASE.build()
        CHANGES[change](reference)
        for setting in (True, False, None):
            for before in BEFORE:
                model = mlp(reshard_after_forward=setting)
                before(model, rank)
                CHANGES[change](model)
                for grad_mode in (torch.no_grad, torch.enable_grad):
                    with grad_mode():
                        assert torch.equal(model(x(rank)), reference(x(rank))), (setting, before.__name__)

    run_ranks(check, 2)


@pytest.mark.parametrize("change", ["sgd_foreach", "adamw_fused", "in_place", "load"])
def test_a_change_is_seen_after_unshard_too(change: str) -> None:
    """The user keeps the units gathered, but holds the sharded parameters and changes those.

    Foreach writes to such DTensors leave no mark anywhere: after them, `reshard()` is the user's to call.
    """

    def check(rank: int, world_size: int) -> None:
        reference = CASE.build()
        CHANGES[change](reference)
        model = mlp()
        held = nn.ParameterDict({name.replace(".", "/"): p for name, p in model.named_parameters()})
        for module in units_of(model):
            module.unshard()
        CHANGES[change](model if change == "load" else held)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(model(x(rank)), reference(x(rank)))

    run_ranks(check, 2)


def test_training_goes_on_from_averaged_and_restored_weights() -> None:
    def check(rank: int, world_size: int) -> None:
        model, reference = mlp(reshard_after_forward=False), CASE.build()
        averages = [param.detach().clone() for param in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            CASE.loss(model, rank + 10 * number).backward()
            grads = oracle_grads(reference, lambda m, r, n=number: CASE.loss(m, r + 10 * n), world_size)
            assert_grads_equal(model, grads, world_size)
            optimizer.step()
            with torch.no_grad():
                for name, grad in grads.items():
                    reference.get_parameter(name).sub_(grad, alpha=0.1)
                params = list(model.parameters())
                torch._foreach_lerp_(averages, params, 0.1)
                trained = [param.clone() for param in params]
                torch._foreach_lerp_(params, averages, 1.0)
                model(x(rank))
                torch._foreach_lerp_(params, trained, 1.0)

    run_ranks(check, 2)


# ---------------------------------------------------------------- writes to gathered parameters


def test_an_edit_of_a_gathered_parameter_is_refused_by_name() -> None:
    def edit_then_reshard(rank: int, world_size: int) -> None:
        model = mlp()
        model.layers[0].unshard()
        with torch.no_grad():
            model.layers[0].bias.add_(1.0)
        model.layers[0].reshard()

    def edit_between_forward_and_backward(rank: int, world_size: int) -> None:
        model = mlp(reshard_after_forward=False)
        loss = CASE.loss(model, rank)
        with torch.no_grad():
            model.layers[2].bias.mul_(2.0)
        loss.backward()

    errors_on_all_ranks(edit_then_reshard, 2, GatheredParamError, "'layers.0.bias'", "Call reshard()")
    errors_on_all_ranks(edit_between_forward_and_backward, 2, GatheredParamError, "'layers.2.bias'")


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_over_gathered_parameters_is_refused_by_name(foreach: bool) -> None:
    def check(rank: int, world_size: int) -> None:
        model = mlp(reshard_after_forward=False)
        loss = CASE.loss(model, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        loss.backward()
        optimizer.step()

    errors_on_all_ranks(
        check, 2, GatheredParamError, "'layers.0.weight'", "SGD", "Build the optimizer before", "reshard()"
    )


def test_an_optimizer_built_after_a_forward_without_grad_trains() -> None:
    def check(rank: int, world_size: int) -> None:
        model, reference = mlp(reshard_after_forward=False), CASE.build()
        forward_only(model, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        CASE.loss(model, rank).backward()
        optimizer.step()
        grads = oracle_grads(reference, CASE.loss, world_size)
        with torch.no_grad():
            for name, grad in grads.items():
                reference.get_parameter(name).sub_(grad, alpha=0.5)
            assert torch.equal(model(x(rank)), reference(x(rank)))

    run_ranks(check, 2)


def test_zero_grad_between_forward_and_backward_reaches_the_shards() -> None:
    """Gathered ones are registered then; with torch the shards keep their gradients, which add up."""

    def check(rank: int, world_size: int) -> None:
        grads = oracle_grads(CASE.build(), CASE.loss, world_size)
        for set_to_none in (True, False):
            model = mlp(reshard_after_forward=False)
            for _ in range(2):
                loss = CASE.loss(model, rank)
                model.zero_grad(set_to_none)
                loss.backward()
                assert_grads_equal(model, grads, world_size)

    run_ranks(check, 2)


# ---------------------------------------------------------------- exceptions that the caller catches


class Fault(Exception):
    """What goes wrong."""


def raise_fault(*_: object) -> None:
    raise Fault


def fails_in_forward(model: nn.Module, rank: int) -> None:
    handle = model.layers[1].register_forward_pre_hook(raise_fault)
    try:
        model(x(rank))
    finally:
        handle.remove()


def fails_in_backward(model: nn.Module, rank: int) -> None:
    hidden = []
    handle = model.layers[1].register_forward_hook(lambda module, args, output: hidden.append(output))
    output = model(x(rank))
    handle.remove()
    hidden[0].register_hook(raise_fault)
    output.square().mean().backward()


def fails_between(model: nn.Module, rank: int) -> None:
    model(x(rank)).square().mean()
    raise Fault


def fails_unsynced(model: nn.Module, rank: int) -> None:
    model.set_requires_gradient_sync(False)
    try:
        fails_in_backward(model, rank)
    finally:
        model.set_requires_gradient_sync(True)


FAILURES = (fails_in_forward, fails_in_backward, fails_between, fails_unsynced)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("reset", [True, False])
def test_iterations_after_a_caught_exception_are_right(
    failure: Callable[[nn.Module, int], None], reset: bool
) -> None:
    def check(rank: int, world_size: int) -> None:
        grads = oracle_grads(CASE.build(), CASE.loss, world_size)
        for setting in (True, False, None):
            model = mlp(reshard_after_forward=setting)
            CASE.loss(model, rank).backward()
            for _ in range(2):
                with pytest.raises(Fault):
                    failure(model, rank)
                if reset:
                    model.reset_iter_state()
                model.zero_grad()
                CASE.loss(model, rank).backward()
                assert_grads_equal(model, grads, world_size)

    run_ranks(check, 2)


def test_a_failure_in_the_first_iteration_does_no_harm() -> None:
    def check(rank: int, world_size: int) -> None:
        grads = oracle_grads(CASE.build(), CASE.loss, world_size)
        for failure in FAILURES:
            model = mlp()
            with pytest.raises(Fault):
                failure(model, rank)
            model.zero_grad()
            CASE.loss(model, rank).backward()
            assert_grads_equal(model, grads, world_size)

    run_ranks(check, 2)
