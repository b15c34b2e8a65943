"""Run one behaviour with shardkit and with torch's FSDP2, and compare what it returns.

A behaviour is a function of a library (either package offers the same names), a rank and the world size. It
returns tensors, and plain values, in dicts and lists; DTensors are compared by their placements and local
parts. At two ranks everything must be equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardkit
from tests.support.ranks import run_ranks

Behaviour = Callable[[Any, int, int], object]


def same_in_both(behaviour: Behaviour, world_size: int = 2) -> None:
    """`behaviour` gives the same under both libraries, on every rank."""

    def both(rank: int, world_size: int) -> None:
        theirs = told(behaviour(torch_fsdp, rank, world_size))
        ours = told(behaviour(shardkit, rank, world_size))
        assert_same("result", ours, theirs, exact=world_size <= 2)

    run_ranks(both, world_size)


def kinds(model: nn.Module) -> dict[str, str]:
    """What is registered under each parameter's name: a DTensor and its placements, or a plain tensor."""
    return {
        name: f"DTensor {param.placements}" if isinstance(param, DTensor) else "plain"
        for name, param in model.named_parameters()
    }


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every gradient, by parameter name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def told(result: Any) -> Any:
    """`result` with every DTensor as its placements, global shape, and local part."""
    if isinstance(result, DTensor):
        return [str(result.placements), tuple(result.shape), result.to_local().detach()]
    if isinstance(result, dict):
        return {key: told(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [told(value) for value in result]
    return result.detach() if isinstance(result, Tensor) else result


def assert_same(where: str, ours: Any, theirs: Any, *, exact: bool) -> None:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        assert list(ours) == list(theirs), f"{where}: keys {list(ours)}, torch has {list(theirs)}"
        for key in theirs:
            assert_same(f"{where}[{key!r}]", ours[key], theirs[key], exact=exact)
    elif isinstance(theirs, list) and isinstance(ours, list):
        assert len(ours) == len(theirs), f"{where}: {len(ours)} items, torch has {len(theirs)}"
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(f"{where}[{index}]", *pair, exact=exact)
    elif isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), (
            f"{where}: {ours.dtype} {tuple(ours.shape)}, torch has {theirs.dtype} {tuple(theirs.shape)}"
        )
        if exact:
            assert torch.equal(ours, theirs), f"{where}: {ours}, torch has {theirs}"
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    else:
        assert ours == theirs, f"{where}: {ours}, torch has {theirs}"
