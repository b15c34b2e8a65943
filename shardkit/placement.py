"""What may be cut, and how a tensor then lies on the ranks: `Blocks` (a wish) and `RaggedShard` (a layout).

Level 1 of the data flow: pure arithmetic on shapes, no communication and no process group. A user states a
`Blocks` for a parameter; the planner turns it into a block size in elements (`block_numel`), places every
parameter of a bucket, and writes each result down as a `RaggedShard`, which the parameter's `RaggedTensor`
then carries. Where the pieces lie in the global tensor is `boxes.py`'s part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, NoReturn

import torch
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, repr=False)
class Blocks:
    """What must stay on one rank: blocks of `rows` rows of a matrix are never cut.

    A matrix is the last two dims. In a stack of experts `(E, out, in)` the blocks restart at each matrix, so
    a block never joins rows of two experts; convolutions `(out, in, kh, kw)` are cut by their first dim. The
    last block of a matrix may be short. Parameters of fewer than two dims are cut anywhere.

    Args:
        rows: rows in a block.
        required: False lets the planner take a divisor of `rows` when the padding would pass its budget.

    Raises:
        ValueError: if `rows` is less than one.
    """

    rows: int = 1
    required: bool = field(default=True, kw_only=True)
    cut: Literal["rows", "elements", "matrices"] = field(default="rows", kw_only=True)

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(
                f"Blocks(rows={self.rows}): expected rows >= 1. For cuts anywhere use Blocks.elements()."
            )

    @classmethod
    def elements(cls) -> Blocks:
        """Cut anywhere, also inside a row."""
        return cls(cut="elements")

    @classmethod
    def whole(cls) -> Blocks:
        """Keep every matrix on one rank."""
        return cls(cut="matrices")

    def __repr__(self) -> str:
        if self.cut != "rows":
            return {"elements": "Blocks.elements()", "matrices": "Blocks.whole()"}[self.cut]
        return f"Blocks({self.rows})" if self.required else f"Blocks({self.rows}, required=False)"


class BlockNumel(NamedTuple):
    """A block in elements, and after how many elements the blocks start anew (None: never)."""

    block_numel: int
    period_numel: int | None


def block_numel(blocks: Blocks, shape: Sequence[int]) -> BlockNumel:
    """The elements of a tensor of `shape` that `blocks` keeps together.

    shape (8, 3), Blocks(2)       ->  6, None     two rows of three
    shape (4, 5, 3), Blocks(2)    ->  6, 15       a matrix of 5 rows gives blocks of 2, 2 and 1 rows
    shape (4, 6, 3), Blocks(2)    ->  6, None     every matrix is a whole number of blocks
    shape (8, 3), Blocks.whole()  -> 24, None
    """
    if len(shape) < 2 or blocks.cut == "elements":
        return BlockNumel(1, None)
    if 0 in shape:  # a row, so that an empty part of a matrix is placed along the dims that the others are
        return BlockNumel(max(1, math.prod(shape[2 if len(shape) == 3 else 1 :])), None)
    matrix_numel = _matrix_numel(shape)
    if blocks.cut == "matrices":
        return BlockNumel(matrix_numel, None)
    num_rows = shape[1] if len(shape) == 3 else shape[0]
    numel = min(blocks.rows, num_rows) * (matrix_numel // num_rows)
    restarts = len(shape) == 3 and matrix_numel % numel != 0
    return BlockNumel(numel, matrix_numel if restarts else None)


@dataclass(frozen=True, slots=True, repr=False)
class RaggedShard(Placement):
    """A tensor cut along a prefix of its dims into pieces of any size, one a rank of a mesh axis.

    The dims of `dims`, always `0..k-1`, are read as one row of *units*; the dims behind them, the suffix, are
    never cut. Rank r holds the next `local_units[r]` units: its local tensor is `(local_units[r], *suffix)`.
    Two ways to lay a tensor of shape (5, 3) on three ranks, the second inside rows:

        RaggedShard((0,), (1, 4, 0))         RaggedShard((0, 1), (4, 0, 11))
        rank 0   | a0 a1 a2 |  (1, 3)        rank 0   | a0 a1 a2 b0 |         (4,)
        rank 1   | b0 b1 b2 |  (4, 3)        rank 1   |                       (0,)
                 | c0 c1 c2 |                rank 2   | b1 b2 c0 .. e1 e2 |   (11,)
                 | d0 d1 d2 |
                 | e0 e1 e2 |
        rank 2   |             (0, 3)

    On a mesh with a tensor-parallel axis too, TP cuts first and the units are those of this rank's TP-local
    tensor; where TP divides a dim of the prefix unevenly, `local_units` are those of this rank's own TP
    coordinate.

    Two placements are equal only if their blocks are; whether going from one to the other moves anything is
    `same_layout`'s answer. `is_shard`, `is_replicate` and `is_partial` raise: code that asks them goes on to
    treat this layout as one of those three and would give wrong data.

    Args:
        dims: the dims that are cut, `(0, 1, .., k-1)`; `()` keeps the whole tensor, one unit, on one rank.
        local_units: units of each rank of the mesh axis; zero is allowed.
        block: how many units the planner kept together.

    Raises:
        ValueError: if `dims` is no prefix, a count is negative, or `block` is less than one.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    block: int = 1

    def __post_init__(self) -> None:
        Placement.__init__(self)  # the C++ half of the object; without it torch's dispatcher crashes
        object.__setattr__(self, "dims", tuple(self.dims))
        object.__setattr__(self, "local_units", tuple(self.local_units))
        if self.dims != tuple(range(len(self.dims))):
            raise ValueError(f"{self}: expected dims to be a prefix (0, 1, ..), got {self.dims}.")
        if not self.local_units or min(self.local_units) < 0:
            raise ValueError(f"{self}: expected one count >= 0 a rank, got {self.local_units}.")
        if self.block < 1:
            raise ValueError(f"{self}: expected block >= 1, got {self.block}.")

    @classmethod
    def from_numels(
        cls, shape: Sequence[int], local_numels: Sequence[int], block_numel: int = 1, *, min_dims: int = 0
    ) -> RaggedShard:
        """The placement that gives each rank the next `local_numels[rank]` elements of a tensor of `shape`.

        The prefix is the shortest of `min_dims` or more whose units divide the block and every count: whole
        rows where the block is whole rows.

            shape (4, 5, 3), numels (6, 9, 45), block 3  ->  RaggedShard((0, 1), (2, 3, 15), block=1)
        """
        cuts = (*local_numels, block_numel)
        for num_dims in range(max(min_dims, min(1, len(shape))), len(shape) + 1):
            unit_numel = max(1, math.prod(shape[num_dims:]))
            if all(numel % unit_numel == 0 for numel in cuts):
                break
        units = [numel // unit_numel for numel in local_numels]
        if 0 in shape:  # nothing to hold, yet the prefix still counts its units
            units[0] = math.prod(shape[:num_dims])
        return cls(tuple(range(num_dims)), tuple(units), block_numel // unit_numel)

    def same_layout(self, other: Placement) -> bool:
        """Whether a tensor placed by `other` lies on every rank exactly as here, whatever the blocks."""
        return (
            isinstance(other, RaggedShard)
            and self.local_units == other.local_units
            and self.dims == other.dims
        )

    def start_unit(self, rank: int) -> int:
        """Units before those of `rank`."""
        return sum(self.local_units[:rank])

    def suffix(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The dims of `shape` that are never cut."""
        return tuple(shape[len(self.dims) :])

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of `rank` when a tensor of `shape` lies so."""
        return (self.local_units[rank], *self.suffix(shape))

    def local_numels(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Elements of each rank when a tensor of `shape` lies so."""
        unit_numel = math.prod(self.suffix(shape))
        return tuple(units * unit_numel for units in self.local_units)

    def check(self, shape: Sequence[int], num_ranks: int) -> None:
        """Raise ValueError unless a tensor of `shape` can lie so on `num_ranks` ranks."""
        if len(self.local_units) != num_ranks:
            raise ValueError(
                f"{self}: expected one count for each of {num_ranks} ranks, got {len(self.local_units)}."
            )
        if len(self.dims) > len(shape):
            raise ValueError(f"{self}: a tensor of shape {tuple(shape)} has too few dims.")
        num_units = math.prod(shape[: len(self.dims)])
        if sum(self.local_units) != num_units:
            raise ValueError(
                f"{self}: dims {self.dims} of shape {tuple(shape)} have {num_units} units, got "
                f"{sum(self.local_units)}. Make local_units sum to {num_units}."
            )
        period = self._period(shape)
        for edge in accumulate(self.local_units):
            if (edge % period) % self.block and edge != num_units:
                raise ValueError(
                    f"{self}: a boundary at unit {edge} of shape {tuple(shape)} cuts a block of {self.block} "
                    "units. Move it to a block edge or state a smaller block."
                )

    def _period(self, shape: Sequence[int]) -> int:
        """Units after which the blocks start anew: one matrix of a stack, else the whole tensor."""
        of_matrix = 1 if len(shape) == 3 and len(self.dims) > 1 else 0
        return max(1, math.prod(shape[of_matrix : len(self.dims)]))

    def is_shard(self, dim: int | None = None) -> NoReturn:
        """Raise: a ragged layout is no `Shard`."""
        self._refuse("is_shard")

    def is_replicate(self) -> NoReturn:
        """Raise: a ragged layout is no `Replicate`."""
        self._refuse("is_replicate")

    def is_partial(self, reduce_op: str | None = None) -> NoReturn:
        """Raise: a ragged layout is no `Partial`."""
        self._refuse("is_partial")

    def _refuse(self, question: str) -> NoReturn:
        raise NotImplementedError(
            f"{self!r}.{question}(): torch's own redistribute, full_tensor and checkpoint loaders know only "
            "Shard, Replicate and Partial, and would give wrong data here. Use shardkit.redistribute(tensor, "
            "placements) to change a layout and shardkit.distribute_tensor to create one."
        )

    def __repr__(self) -> str:
        block = f", block={self.block}" if self.block != 1 else ""
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units}{block})"

    def __str__(self) -> str:
        return repr(self)

    def __fx_repr__(self) -> tuple[str, dict[str, type[RaggedShard]]]:
        """How a graph of torch.compile writes it down, as torch's own placements say."""
        return repr(self), {"RaggedShard": RaggedShard}

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[tuple[int, ...], tuple[int, ...], int]]:
        return RaggedShard, (self.dims, self.local_units, self.block)


torch.serialization.add_safe_globals([RaggedShard])


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`, as torch computes them: a dim of size 0 counts as 1."""
    sizes = [max(1, size) for size in shape]
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _matrix_numel(shape: Sequence[int]) -> int:
    """Elements of one matrix: the last two dims, or everything in a convolution."""
    return shape[-2] * shape[-1] if len(shape) < 4 else math.prod(shape)
