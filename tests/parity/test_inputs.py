"""Inputs that need gradients reach a unit's forward as they were passed, whatever holds them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardkit import fully_shard
from tests.support.ranks import run_ranks


@dataclass
class Inputs:
    """A field that the constructor does not take comes before one that it does."""

    extra: Tensor = field(init=False, default_factory=lambda: torch.zeros(1))
    rows: Tensor | None = None


class Reader(nn.Linear):
    def forward(self, inputs: Inputs, same_rows: Tensor) -> Tensor:
        assert inputs.rows is same_rows, "one tensor has become two"
        return super().forward(inputs.rows) + inputs.extra


def test_inputs_in_a_dataclass_are_not_mixed_up() -> None:
    def check(rank: int, world_size: int) -> None:
        model, twin = Reader(3, 2), Reader(3, 2)
        twin.load_state_dict(model.state_dict())
        fully_shard(model)
        grads = []
        for module in (model, twin):
            rows = torch.arange(6.0).view(2, 3).requires_grad_()
            inputs = Inputs(rows=rows)
            inputs.extra = torch.full((1,), 10.0, requires_grad=True)
            module(inputs, rows).square().sum().backward()
            grads.append((rows.grad, inputs.extra.grad))
        assert all(torch.equal(ours, expected) for ours, expected in zip(*grads, strict=True))

    run_ranks(check, 1)
