"""What happens to parameters between iterations: optimizer steps and state dicts.

Level 12 of the data flow. Registers hooks that torch offers for this; each does one thing to the parameters
it is given.
"""

from __future__ import annotations

from functools import cache
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardkit.errors import GatheredParamError
from shardkit.params import name_before_sharding
from shardkit.sharded_param import gathered_names
from shardkit.unit import Unit


@cache
def watch_optimizers() -> None:
    """Refuse, from now on, a step over gathered parameters, and mark what steps change."""
    register_optimizer_step_pre_hook(_refuse_gathered)
    register_optimizer_step_post_hook(_mark_changed)


def watch_state_dicts(unit: Unit) -> None:
    """Let `state_dict` and `load_state_dict`, of any module above or inside the unit, see its shards."""

    def to_shards(*_: object) -> None:
        if unit.depth > 0:
            raise RuntimeError(
                f"unit {unit.name!r}: its state dict was asked for, or loaded, while its forward runs on the "
                "gathered parameters. Do it before or after the forward."
            )
        unit.reshard()
        unit.adopt()

    for module in {owner.module for param in unit.params for owner in param.owners}:
        module.register_state_dict_pre_hook(to_shards)
        module.register_load_state_dict_pre_hook(to_shards)


def _refuse_gathered(optimizer: Optimizer, *_: object) -> None:
    for param in _params(optimizer):
        if isinstance(param, DTensor):
            continue
        if (name := name_before_sharding(param)) is not None:
            raise GatheredParamError(
                f"param {name!r}: {type(optimizer).__name__} holds it as it was before fully_shard, so its "
                "step would change what nothing uses any more. Build the optimizer after fully_shard."
            )
        if (name := gathered_names.get(param)) is not None:
            raise GatheredParamError(
                f"param {name!r}: {type(optimizer).__name__} holds it gathered, as model.parameters() gave "
                "it after a forward without backward, and its step would be lost. Build the optimizer before "
                "the first forward, or call reshard() on the module, so that it holds the shards."
            )


def _mark_changed(optimizer: Optimizer, *_: object) -> None:
    """Fused and foreach steps leave no trace on the version counters of what they change."""
    torch.autograd.graph.increment_version(
        [param for param in _params(optimizer) if isinstance(param, DTensor)]
    )


def _params(optimizer: Optimizer) -> chain[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)
