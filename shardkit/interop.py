"""What torch's own code expects to find on a sharded module: pipelining, compile, `fully_shard.state`.

Level 12 of the data flow. torch's pipelining schedules drive a stage through `fully_shard.state(module)` and
the names of torch's state classes. `UnitState` offers those names and passes everything on to the `Unit`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from shardkit._torch import State, attach_state, hide_from_dynamo, state_of
from shardkit.unit import Unit


class UnitState(State):
    """One unit under the names that torch's code uses."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    @property
    def all_states(self) -> list[UnitState]:
        """The states of all units of the tree (`state._state_ctx.all_states`)."""
        return [UnitState(unit) for unit in self.unit.tree.units]

    def post_backward(self) -> None:
        """Reduce and reshard the unit (`param_group.post_backward()`). Collective over the mesh."""
        self.unit.post_backward()

    def _root_post_backward_final_callback(self) -> None:
        self.unit.tree.end_backward()

    @property
    def _state_ctx(self) -> UnitState:
        return self

    @property
    def _fsdp_param_groups(self) -> list[UnitState]:
        return [self]

    @property
    def _fsdp_param_group(self) -> UnitState:
        return self

    @property
    def _mp_policy(self) -> object:
        return self.unit.policy.precision


def attach_unit(unit: Unit) -> None:
    """Let `fully_shard.state(module)`, torch's and ours, find the unit of each of its modules."""
    state = UnitState(unit)
    for module in unit.modules:
        attach_state(module, state)
    for _, module in unit.managed:
        hide_from_dynamo(module)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard(module)` made, if it did."""
    state = state_of(module)
    return state.unit if isinstance(state, UnitState) else None


def units_in(model: nn.Module) -> list[Unit]:
    """The units of the modules in `model`, as their forwards end: inner ones first."""
    found = dict.fromkeys(unit for module in model.modules() if (unit := unit_of(module)) is not None)
    trees = dict.fromkeys(unit.tree for unit in found)
    return [unit for tree in trees for unit in tree.units if unit in found]


def gather_for_half_backward(units: Sequence[Unit]) -> None:
    """Gather what a schedule needs between the halves of its backwards, and keep it until it is resharded.

    Collective over the shard axis.
    """
    resharded = [unit for unit in units if not all(bucket.is_unsharded for bucket in unit.buckets)]
    for unit in resharded:
        unit.unshard()
    for unit in resharded:
        unit.wait_for_unshard()
        unit.is_pinned = True
    trees = dict.fromkeys(unit.tree for unit in resharded)
    for tree in trees:
        if not tree.halves_backward:
            tree.halves_backward = True
            warnings.warn(
                f"unit {resharded[0].name!r}: the pipeline schedule computes gradients of inputs and of "
                "weights apart, so the stage's units stay gathered from their first forward to the last "
                "gradients of weights. Pass reshard_after_forward=False to fully_shard to say so.",
                stacklevel=3,
            )
