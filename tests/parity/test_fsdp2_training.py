"""Optimizers, gradient hooks, clipping, loss scaling and offload beside torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import CPUOffloadPolicy
from tests.parity.peers import grads, kinds, same_in_both, values
from tests.support.models import CASES

Library = Any


def mlp(lib: Library, **options: object) -> nn.Module:
    return CASES["mlp"].sharded(lib.fully_shard, **options)


def backward(model: nn.Module, number: int) -> Tensor:
    """Loss and gradients of the MLP's batch of that number."""
    loss = CASES["mlp"].loss(model, number)
    loss.backward()
    return loss


def test_post_accumulate_hooks_run_in_order_on_reduced_gradients() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model, seen = mlp(lib), []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((name, p.grad.to_local().clone()))
            )
        backward(model, rank)
        return seen

    same_in_both(run)


def test_an_optimizer_in_backward_trains_as_a_step_does() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        results = []
        for in_backward in (True, False):
            model = mlp(lib)
            optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

            def step(param: nn.Parameter, optimizers: dict = optimizers) -> None:
                optimizers[param].step()
                optimizers[param].zero_grad()

            for number in range(3):
                if in_backward and number == 0:
                    for param in model.parameters():
                        param.register_post_accumulate_grad_hook(step)
                backward(model, rank + 10 * number)
                if not in_backward:
                    for param in model.parameters():
                        step(param)
            results.append(values(model))
        for name, value in results[0].items():
            assert torch.equal(value.to_local(), results[1][name].to_local())
        return results

    same_in_both(run)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "adamw_loop": lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-3, foreach=False),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-3, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-3, fused=True),
    "adam_amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, eps=1e-3, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, eps=1e-3),
}


def test_stock_optimizers_step_alike() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        results = {}
        for name, make in OPTIMIZERS.items():
            model = CASES["few_rows"].sharded(lib.fully_shard)
            optimizer = make(model.parameters())
            for step in range(3):
                optimizer.zero_grad()
                CASES["few_rows"].loss(model, rank + 10 * step).backward()
                optimizer.step()
            results[name] = values(model)
        return results

    same_in_both(run)


@pytest.mark.parametrize("foreach", [True, False])
def test_torchs_clipping_clips_alike(foreach: bool) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        backward(model, rank)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
        assert isinstance(norm, DTensor)
        return norm.full_tensor(), grads(model)

    same_in_both(run)


def test_a_grad_scaler_skips_on_all_ranks_where_one_shard_overflows() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
        results = []
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(CASES["mlp"].loss(model, rank + 10 * step)).backward()
            if step == 1 and rank == 1:
                model.layers[0].weight.grad.to_local()[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            results.append([scaler.get_scale(), values(model)])
        return results

    same_in_both(run)


def test_offload_to_the_cpu_trains_alike() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib, offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
        for step in range(2):
            for part in range(2):
                backward(model, rank + 10 * step + part)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return kinds(model), grads(model), values(model)

    same_in_both(run)
