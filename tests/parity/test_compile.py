"""torch.compile around sharded blocks and around the whole model: right gradients, nothing compiled again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from shardkit import fully_shard
from tests.support.models import CASES
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import run_ranks

CASE = CASES["transformer"]


def blocks_first(compile: Callable[[nn.Module], None]) -> nn.Module:
    """Each block is compiled, then sharded."""
    model = CASE.build()
    for block in model.blocks:
        compile(block)
        fully_shard(block)
    return fully_shard(model)


def blocks_last(compile: Callable[[nn.Module], None]) -> nn.Module:
    """Each block is sharded, then compiled."""
    model = CASE.build()
    for block in model.blocks:
        fully_shard(block)
        compile(block)
    return fully_shard(model)


def whole_model(compile: Callable[[nn.Module], None]) -> nn.Module:
    model = CASE.sharded(fully_shard)
    compile(model)
    return model


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("build", [blocks_first, blocks_last, whole_model])
@pytest.mark.filterwarnings("default")
def test_compiled_models_train_and_are_compiled_once(
    build: Callable[[Callable[[nn.Module], None]], nn.Module],
) -> None:
    def check(rank: int, world_size: int) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model, reference = build(lambda module: module.compile(backend=counter)), CASE.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        num_frames = []
        for step in range(4):
            optimizer.zero_grad()
            CASE.loss(model, rank + 10 * step).backward()
            grads = oracle_grads(reference, lambda m, r, step=step: CASE.loss(m, r + 10 * step), world_size)
            assert_grads_equal(model, grads, world_size)
            optimizer.step()
            with torch.no_grad():
                for name, grad in grads.items():
                    reference.get_parameter(name).sub_(grad, alpha=0.1)
            num_frames.append(counter.frame_count)
        assert num_frames[0] >= 1
        assert num_frames[1] == num_frames[3], f"compiled again after the second step: {num_frames}"

    run_ranks(check, 2, timeout=110)
