"""What Shampoo and SOAP have in common: blocks, their state in stacks, and vectors beside them.

The gradient of a block travels in float32 to the rank that works on it, which alone has the block's state,
and the direction comes back: two messages an element that the owner lacks, however much state there is.

    gradients --read--> whole blocks --step_blocks, with the stacks of their owner--> directions --write--> W

Parameters of fewer than two dims have no blocks; their state lies as they do and nothing travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor

from shardkit.boxes import Box
from shardkit.optim.algorithm import Group, Target
from shardkit.optim.blocks import Dealer, grid_of, stack_layout
from shardkit.optim.pieces import Field, Piece, shares_of
from shardkit.optim.placed import Placed

Sizes = Mapping[str, tuple[int, int]]
VECTOR_STATE = ("exp_avg", "exp_avg_sq")


class Moment(NamedTuple):
    """Where a block is in its schedule: equal for blocks that are stepped together."""

    step: int  # of the parameter, from one
    begins: bool  # the first step
    refreshes: bool  # new roots or eigenvectors in this step


class BlockRule(Protocol):
    """The equations of an optimizer of blocks; pure but for the state that they are handed."""

    defaults: Mapping[str, object]
    state_settings: Sequence[str]

    def check_group(self, group: Group) -> None:
        """Raise ValueError for a setting out of range."""

    def sizes(self, rows: int, cols: int, group: Group) -> Sizes:
        """The size of each state of a block of `rows` x `cols`, by name."""

    def flops(self, rows: int, cols: int, group: Group) -> float:
        """Operations of a step on a block, in the mean over steps."""

    def moment(self, step: int, number: int, group: Group) -> Moment:
        """What is due for the block of this number in a step; spread evenly over the blocks."""

    def step_blocks(self, grad: Tensor, state: dict[str, Tensor], group: Group, moment: Moment) -> Tensor:
        """The direction of a block, or of a batch of equal ones; `state` is updated in place.

        Args:
            grad: (.., rows, cols) float32.
            state: by name, (.., n, m) as `sizes` says.
        """

    def moves(self, step: int) -> bool:
        """Whether blocks are stepped, and decayed, in this step."""

    def vector_direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Group, step: int) -> Tensor:
        """The direction of a part of a vector, whose state is `exp_avg` and `exp_avg_sq`."""


class BlockAlgorithm:
    """A `PieceAlgorithm` whose pieces are blocks of at most `group["block"]` rows and columns.

    Args:
        rule: what is done with a block.
    """

    def __init__(self, rule: BlockRule) -> None:
        self.rule, self.defaults, self.state_settings = rule, rule.defaults, rule.state_settings
        self.plan_settings: Sequence[str] = ()
        self.adds_grads_to: str | None = None

    def check_group(self, group: Group) -> None:
        """Raise ValueError for a setting out of range."""
        for name in ("block", "update_every"):
            if group[name] < 1:
                raise ValueError(f"{name}: expected at least 1, got {group[name]}.")
        self.rule.check_group(group)

    def pieces(self, at: Placed, group: Group, dealer: Dealer) -> list[Piece]:
        """One a block, with its owner and its number; none of a vector."""
        if len(at.layout.shape) < 2:
            return []
        grid = grid_of(at.name, at.layout.shape, group["block"], group["flatten"])
        shares = [shares_of(at.layout, block.region, at.axes, at.me) for block in grid.blocks]
        flops = [self.rule.flops(block.rows, block.cols, group) for block in grid.blocks]
        # not by the group's settings: a loaded one may have others, and state stays where it is
        costs = [self.rule.flops(block.rows, block.cols, dict(self.defaults)) for block in grid.blocks]
        first = crc32(at.name.encode())  # the same whatever else the optimizer holds
        homes = dealer.deal(at, grid, shares, costs)
        return [
            Piece(
                at.name,
                block.region.label(at.layout.shape),
                block.rows,
                block.cols,
                (Field(block.region, torch.float32, shares[i]),),
                flops[i],
                homes[i],
                first + i,
            )
            for i, block in enumerate(grid.blocks)
        ]

    def init_state(
        self, at: Placed, param: Tensor, group: Group, pieces: Sequence[Piece]
    ) -> dict[str, Tensor]:
        """`step`, and a stack of zeros for each state of the blocks, with their owners; float32."""
        state = {"step": torch.zeros((), dtype=torch.float32)}
        if len(at.layout.shape) < 2:
            return state | {name: torch.zeros_like(param, dtype=torch.float32) for name in VECTOR_STATE}
        grid = grid_of(at.name, at.layout.shape, group["block"], group["flatten"])
        for name, size in self.rule.sizes(grid.rows, grid.cols, group).items():
            layout = stack_layout(at, grid, pieces, size)
            state[name] = at.zeros(layout, torch.float32, param.device)
        return state

    def begin(self, targets: Sequence[Target]) -> None:
        """Count the step, and step the vectors."""
        torch._foreach_add_([target.state["step"] for target in targets], 1.0)
        for target in targets:
            if len(target.at.layout.shape) < 2:
                step, group = int(target.state["step"].item()), target.group
                direction = self.rule.vector_direction(target.grad.float(), target.state, group, step)
                _apply(target.param, direction, group)

    def read(self, target: Target, piece: Piece, field: int, box: Box) -> Tensor:
        """The gradient."""
        return box.view(target.grad)

    def compute(
        self, targets: Sequence[Target], pieces: Sequence[Piece], fields: Sequence[list[Tensor]]
    ) -> list[list[Tensor]]:
        """The directions of whole blocks; those of one size together where `steps_batches` says so."""
        alike: dict[object, list[int]] = {}
        moments = []
        for i, (target, piece) in enumerate(zip(targets, pieces, strict=True)):
            moment = self.rule.moment(int(target.state["step"].item()), piece.number, target.group)
            moments.append(moment)
            together = steps_batches(fields[i][0].device)
            key = (id(target.group), moment, piece.rows, piece.cols) if together else i
            alike.setdefault(key, []).append(i)
        results: dict[int, Tensor] = {}
        for places in alike.values():
            first = places[0]
            grads = [fields[i][0].view(pieces[i].rows, pieces[i].cols) for i in places]
            states = [self._state_of(targets[i], pieces[i]) for i in places]
            directions = self._step_alike(grads, states, targets[first].group, moments[first])
            results.update(zip(places, directions, strict=True))
        return [[results[i].reshape(whole[0].shape)] for i, whole in enumerate(fields)]

    def write(self, target: Target, piece: Piece, field: int, box: Box, values: Tensor) -> None:
        """Decay the parameter and step along the direction."""
        if self.rule.moves(int(target.state["step"].item())):
            _apply(box.view(target.param), values, target.group)

    def _state_of(self, target: Target, piece: Piece) -> dict[str, Tensor]:
        """The block's part of each stack."""
        assert piece.home is not None
        return {
            name: target.state[name].flatten(0, -3)[piece.home.slot, :rows, :cols]
            for name, (rows, cols) in self.rule.sizes(piece.rows, piece.cols, target.group).items()
        }

    def _step_alike(
        self, grads: Sequence[Tensor], states: Sequence[dict[str, Tensor]], group: Group, moment: Moment
    ) -> Sequence[Tensor]:
        if len(grads) == 1:
            return [self.rule.step_blocks(grads[0], states[0], group, moment)]
        batch = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        directions = self.rule.step_blocks(torch.stack(list(grads)), batch, group, moment)
        for name, stacked in batch.items():
            torch._foreach_copy_([state[name] for state in states], list(stacked.unbind()))
        return directions.unbind()


def steps_batches(device: torch.device) -> bool:
    """Whether equal blocks are stepped as one batch.

    Not on the CPU, where a product of small matrices is not to the bit what it is in a batch, and what is in
    a batch depends on the number of ranks.
    """
    return device.type != "cpu"


def _apply(param: Tensor, direction: Tensor, group: Group) -> None:
    lr = float(group["lr"])
    param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
