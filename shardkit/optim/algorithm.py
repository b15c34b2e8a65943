"""What the optimizer asks of an algorithm: its settings, its state, its pieces and its arithmetic.

`muon.py`, `adamw.py`, `adamw8bit.py` and, for Shampoo and SOAP, `block_algorithm.py` answer. An elementwise
algorithm does all in `begin`; a `PieceAlgorithm` needs whole matrices or blocks, and names them as pieces,
which the engine brings together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shardkit.boxes import Box
from shardkit.optim.blocks import Dealer
from shardkit.optim.pieces import Piece
from shardkit.optim.placed import Placed

Group = dict[str, Any]  # torch's parameter group


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter in a step: local tensors of the parameter, its gradient and its state, all contiguous."""

    at: Placed
    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    group: Group

    @property
    def name(self) -> str:
        """Its fqn, or its number."""
        return self.at.name


class Algorithm(Protocol):
    """One way to step; `defaults` are the settings of a group.

    `state_settings` names those that decide what a saved state means: only equal ones can load it.
    `plan_settings` names those beside them that pieces follow from: a load can change them, a step cannot.
    `adds_grads_to` names the state to which gradients are added as they are, so that they come in its dtype;
    None where float32 is computed with, whatever they come in.
    """

    defaults: Mapping[str, object]
    state_settings: Sequence[str]
    plan_settings: Sequence[str]
    adds_grads_to: str | None

    def check_group(self, group: Group) -> None:
        """Raise ValueError for settings out of range; `settings.py` has seen of which kind they are."""

    def init_state(
        self, at: Placed, param: Tensor, group: Group, pieces: Sequence[Piece]
    ) -> dict[str, Tensor]:
        """The state of one parameter: laid out as it is, or with the ranks that work on its pieces."""

    def begin(self, targets: Sequence[Target]) -> None:
        """The elementwise part of a step, before any piece is read."""


@runtime_checkable
class PieceAlgorithm(Algorithm, Protocol):
    """One that works on whole pieces."""

    def pieces(self, at: Placed, group: Group, dealer: Dealer) -> Sequence[Piece]:
        """What must come together of one parameter.

        Args:
            dealer: gives pieces with state of their own to ranks; it has dealt those of earlier parameters.

        Raises:
            ValueError: the parameter is none that this algorithm can step.
        """

    def read(self, target: Target, piece: Piece, field: int, box: Box) -> Tensor:
        """The values of a field of a piece in a box of this rank's local tensor."""

    def compute(
        self, targets: Sequence[Target], pieces: Sequence[Piece], fields: Sequence[list[Tensor]]
    ) -> list[list[Tensor]]:
        """The results for whole pieces, given their parameters and their fields of `field.region.size`."""

    def write(self, target: Target, piece: Piece, field: int, box: Box, values: Tensor) -> None:
        """Use the results that belong in a box of this rank's local tensor."""
