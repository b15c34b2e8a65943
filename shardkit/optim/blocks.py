"""Blocks of matrices, who works on each, and where the state of a block lies.

Shapes and layouts in, numbers out; only the `Dealer` remembers what it dealt. A matrix is cut into bands of
`block` rows, and these into `block` columns; a block is a piece whose state (preconditioners, moments) is on
the one rank that works on it. Over all blocks of a parameter such a state is one tensor, (row_blocks,
col_blocks, n, m) behind the dims of a stack, short blocks filled up with zeros; each rank has a run of blocks
in row-major order:

    w (40, 32), block 16       rows 0..24 on rank 0, the others on rank 1        owners    0 0
                               band 1 (rows 16..31) is cut: one block for each             0 1
                                                                                           1 1
    its state (3, 2, 16, 16) is RaggedShard((0, 1), (3, 3))

So a checkpoint knows of blocks, not of ranks, and goes to any number of ranks as a ragged parameter does.

[Note: dealing] The blocks of a parameter go to ranks that hold part of them, in order: owners then never fall
in row-major order. Each rank is due the cost of what it holds, and given at most ROOM times its due, over all
parameters so far; so loads stay even. Within that, all runs of a parameter are cut at once so that the least
travels (`runs.py`). Band by band, the largest holder first, more would travel (8 % of Llama-3-8B in 4-layer
units on 64 ranks): a rank's due of later bands would not count yet, and what it takes of one band may crowd
out more of the next. What is dealt depends on the layouts of this and earlier parameters of the optimizer
alone, never on later ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit._torch import strided_shard
from shardkit.boxes import Layout, local_boxes
from shardkit.optim.pieces import (
    Home,
    Matrix,
    Piece,
    Region,
    Shares,
    coordinates_on,
    matrices_of,
    num_stack_dims,
)
from shardkit.optim.placed import Placed
from shardkit.optim.runs import Starts, cut_runs
from shardkit.placement import RaggedShard

ROOM = 1.08  # how far above its due a rank may go to let less travel: 7 blocks for 6.5


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The blocks of a parameter.

    Args:
        shape: blocks along each dim: those of a stack, rows, columns.
        rows, cols: of the largest block.
        blocks: in row-major order of `shape`.
    """

    shape: tuple[int, ...]
    rows: int
    cols: int
    blocks: tuple[Matrix, ...]


def grid_of(name: str, shape: Sequence[int], block: int, flatten: bool | None = None) -> BlockGrid:
    """The blocks of at most `block` x `block` in a parameter, from the first row and column of each matrix.

    shape (40, 32), block 16         (3, 2) blocks: 16 x 16, and 8 x 16 in the last band
    shape (3, 40, 32), block 16      (3, 3, 2): blocks start anew at each of three matrices
    shape (8, 6, 5, 5), block 64     (1, 3): the columns of a convolution are cut between input channels,
                                     here after two, 50 columns

    Raises:
        ValueError: the parameter has fewer than two dims.
    """
    return _cut(matrices_of(name, shape, flatten=flatten), tuple(shape), block, flatten)


@lru_cache(maxsize=256)
def _cut(matrices: tuple[Matrix, ...], shape: tuple[int, ...], block: int, flatten: bool | None) -> BlockGrid:
    """The grid, in common to the parameters of all layers."""
    num_stack = num_stack_dims(shape, flatten)
    num_rows, num_cols, *inner = shape[num_stack:]
    inner_numel = max(1, math.prod(inner))
    band, step = max(1, min(block, num_rows)), max(1, min(block // inner_numel, num_cols))
    blocks = []
    for matrix, row, col in product(matrices, range(0, num_rows, band), range(0, num_cols, step)):
        rows, cols = min(band, num_rows - row), min(step, num_cols - col)
        offset = (*matrix.region.offset[:num_stack], row, col, *(0 for _ in inner))
        region = Region(offset, (*(1 for _ in range(num_stack)), rows, cols, *inner))
        blocks.append(Matrix(region, rows, cols * inner_numel))
    grid_shape = (*shape[:num_stack], -(-num_rows // band), -(-num_cols // step))
    return BlockGrid(grid_shape, band, step * inner_numel, tuple(blocks))


@dataclass(slots=True)
class _Ledger:
    """What each rank of a set was due so far, and what it was given."""

    due: list[float]
    given: list[float]


@dataclass(slots=True)
class Dealer:
    """Gives every block a home, parameter by parameter; see [Note: dealing]."""

    _ledgers: dict[tuple[int, ...], _Ledger] = field(default_factory=dict)

    def deal(
        self, at: Placed, grid: BlockGrid, shares: Sequence[Shares], flops: Sequence[float]
    ) -> tuple[Home, ...]:
        """The homes of the blocks of the next parameter, equal on all its ranks.

        Args:
            at: where the parameter lies.
            grid: its blocks.
            shares: who holds what of each block.
            flops: the cost of each.
        """
        num_ranks = len(at.ranks)
        ledger = self._ledgers.setdefault(at.ranks, _Ledger([0.0] * num_ranks, [0.0] * num_ranks))
        homes: dict[int, Home] = {}
        for column in _columns(at.layout, at.axes, at.me, grid):
            if any(shares[number].numel_of.keys().isdisjoint(column.ranks) for number in column.blocks):
                column = column._replace(in_order=False)  # a tensor-parallel cut between edges of blocks
            homes |= _Dealing(column, ledger, shares, flops).homes()
        return tuple(homes[number] for number in range(len(grid.blocks)))


def stack_layout(at: Placed, grid: BlockGrid, pieces: Sequence[Piece], size: tuple[int, int]) -> Layout:
    """Where state of `size` (rows, cols) a block lies, one tensor over all blocks: with their owners."""
    run_axis, placements = _axes_of_stack(at.layout, at.axes, grid)
    if run_axis is not None:
        counts = Counter(piece.home.rank for piece in pieces if piece.home is not None)
        me = coordinates_on(at.layout, at.axes, at.me).index(at.me)
        mine = next(c for c in _columns(at.layout, at.axes, at.me, grid) if me in c.ranks)
        units = tuple(counts[rank] for rank in mine.ranks)
        placements[run_axis] = RaggedShard(tuple(range(len(grid.shape))), units)
    return Layout((*grid.shape, *size), at.layout.mesh_shape, tuple(placements))


class _Column(NamedTuple):
    """Ranks that differ on the axis of the runs alone, in order, and the blocks that they share out."""

    ranks: tuple[int, ...]
    blocks: tuple[int, ...]
    in_order: bool  # whether each holds part of some, behind what the rank before it holds


class _Dealing:
    """The blocks of one column: a run for each of its ranks, by place among them."""

    def __init__(
        self, column: _Column, ledger: _Ledger, shares: Sequence[Shares], flops: Sequence[float]
    ) -> None:
        self.column, self.ledger = column, ledger
        self.costs = [flops[number] for number in column.blocks]
        self.held = self._held(shares) if column.in_order else self._held_evenly()

    def homes(self) -> dict[int, Home]:
        """Give every block to a rank, and note what each was due and is given."""
        self._note_due()
        slots: Counter[int] = Counter()
        found = {}
        for number, cost, place in zip(self.column.blocks, self.costs, self._owners(), strict=True):
            rank = self.column.ranks[place]
            found[number] = Home(rank, slots[rank])
            slots[rank] += 1
            self.ledger.given[rank] += cost
        return found

    def _held(self, shares: Sequence[Shares]) -> list[dict[int, int]]:
        """Elements of each block by place."""
        place_of = {rank: place for place, rank in enumerate(self.column.ranks)}
        return [
            {place_of[rank]: numel for rank, numel in shares[number].numel_of.items() if rank in place_of}
            for number in self.column.blocks
        ]

    def _held_evenly(self) -> list[dict[int, int]]:
        """As if the ranks held them in order: where it is all the same, some near what would be even."""
        num_ranks, num_blocks = len(self.column.ranks), len(self.costs)
        near = max(2, -(-num_ranks // max(1, num_blocks)))
        middles = [i * num_ranks // num_blocks for i in range(num_blocks)]
        return [dict.fromkeys(range(max(0, m - near), min(num_ranks, m + near + 1)), 1) for m in middles]

    def _note_due(self) -> None:
        due, ranks = self.ledger.due, self.column.ranks
        if not self.column.in_order:
            for rank in ranks:
                due[rank] += sum(self.costs) / len(ranks)
            return
        for cost, held in zip(self.costs, self.held, strict=True):
            total = sum(held.values())
            for place, numel in held.items():
                due[ranks[place]] += cost * numel / total

    def _owners(self) -> list[int]:
        """Places, never falling: the runs that let the least travel."""
        if not self.costs:
            return []
        places = sorted({place for held in self.held for place in held})
        due, given = (
            [of_rank[self.column.ranks[place]] for place in places]
            for of_rank in (self.ledger.due, self.ledger.given)
        )
        level = [max(0.0, d - g) for d, g in zip(due, given, strict=True)]
        rooms = [max(0.0, ROOM * d - g) for d, g in zip(due, given, strict=True)]
        cuts = cut_runs(self.costs, self._starts(places, level), rooms)
        wanted = [place for place, (a, b) in zip(places, pairwise(cuts), strict=True) for _ in range(a, b)]
        owners: list[int] = []
        for held, place in zip(self.held, wanted, strict=True):
            first = owners[-1] if owners else 0  # a rank may hold the ends of a band and not its middle
            fitting = [other for other in held if other >= first]
            owners.append(min(fitting, key=lambda other: (abs(other - place), other), default=first))
        return owners

    def _starts(self, places: Sequence[int], level: Sequence[float]) -> list[Starts]:
        """Where the runs of all places but the first may start, for what travels then.

        Of equal ones, by less than an element, that is best which is nearest to shares by `level`.
        """
        first: dict[int, int] = {}
        end: dict[int, int] = {}
        for i, held in enumerate(self.held):
            for place in held:
                first.setdefault(place, i)
                end[place] = i + 1
        # of ranks with less than a row, a later one may hold none behind what an earlier one holds
        lasts = accumulate((end[place] for place in places), max)
        done = [0.0, *accumulate(self.costs)]
        evenly = [done[-1] * part / (sum(level) or 1.0) for part in accumulate(level)]
        weight = 0.5 / (len(places) * done[-1])
        starts = []
        for (before, place), last, even in zip(pairwise(places), lasts, evenly, strict=False):
            low = first[place]
            kept = (held.get(place, 0) - held.get(before, 0) for held in self.held[low:last])
            prices = enumerate(accumulate(kept, initial=0), low)
            starts.append(Starts(low, [price + weight * abs(done[i] - even) for i, price in prices]))
        return starts


@lru_cache(maxsize=256)
def _columns(
    layout: Layout, axes: tuple[int, ...], me: tuple[int, ...], grid: BlockGrid
) -> tuple[_Column, ...]:
    """The ranks of a parameter by their places on the other axes, with the blocks of each such place."""
    run_axis, placements = _axes_of_stack(layout, axes, grid)
    of_grid = Layout(grid.shape, layout.mesh_shape, tuple(placements))
    by_place: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in enumerate(coordinates_on(layout, axes, me)):
        other = tuple(0 if axis == run_axis else c for axis, c in enumerate(coordinate))
        by_place.setdefault(other, []).append(rank)
    in_order = run_axis is not None and _cuts_in_order(layout, run_axis, grid)
    columns = []
    for other, ranks in by_place.items():
        blocks = [
            sum(i * math.prod(grid.shape[dim + 1 :]) for dim, i in enumerate(index))
            for box in local_boxes(of_grid, other)
            for index in product(*(range(a, a + n) for a, n in zip(box.offset, box.size, strict=True)))
        ]
        columns.append(_Column(tuple(ranks), tuple(blocks), in_order or len(ranks) == 1))
    return tuple(columns)


def _axes_of_stack(
    layout: Layout, axes: tuple[int, ...], grid: BlockGrid
) -> tuple[int | None, list[Placement]]:
    """The mesh axis along which the blocks are dealt in runs, and what the other axes do with the grid.

    That is the ragged axis, or the first that cuts, or the last of those that cut what this one leaves. The
    others chunk the dim of the grid that they cut in the parameter, or one that they divide more evenly; so
    does the first, where it cuts columns, or rows of each matrix of a stack, at the edges of blocks: a run
    would have all blocks travel then, and so none does.
    """
    placements: list[Placement] = [Replicate() for _ in layout.placements]
    run_axis = layout.ragged_axis if layout.ragged_axis in axes else next(iter(axes), None)
    for axis in axes:
        cut = layout.placements[axis]
        if run_axis is not None and type(cut) is Shard and cut == layout.placements[run_axis]:
            run_axis = axis
    for axis in axes:
        dim = _grid_dim(layout, axis, len(grid.shape))
        if axis != run_axis:
            num_ranks = layout.mesh_shape[axis]
            fullest = [-(-n // num_ranks) / max(1, n) for n in grid.shape]
            dim = min(range(len(fullest)), key=lambda d: (fullest[d], d != dim, d))
            placements[axis] = Shard(dim)
        elif not _cuts_in_order(layout, axis, grid) and _cuts_between_blocks(layout, axis, grid):
            placements[axis] = Shard(dim)
            run_axis = None
    return run_axis, placements


def _grid_dim(layout: Layout, axis: int, num_dims: int) -> int:
    """The dim of the grid that an axis cuts; a ragged one the first."""
    placement = layout.placements[axis]
    strided = strided_shard(placement)
    if strided is not None:
        return min(strided[0], num_dims - 1)
    return min(placement.dim, num_dims - 1) if isinstance(placement, Shard) else 0


def _cuts_in_order(layout: Layout, axis: int, grid: BlockGrid) -> bool:
    """Whether in row-major order the blocks of a rank come behind those of the rank before it."""
    if isinstance(layout.placements[axis], RaggedShard):
        return True
    return math.prod(grid.shape[: _grid_dim(layout, axis, len(grid.shape))]) == 1


def _cuts_between_blocks(layout: Layout, axis: int, grid: BlockGrid) -> bool:
    """Whether every rank of an axis has as many whole blocks along the dim that it cuts."""
    placement = layout.placements[axis]
    if not grid.blocks or type(placement) is not Shard or placement.dim >= len(grid.shape):
        return False
    edge = layout.mesh_shape[axis] * grid.blocks[0].region.size[placement.dim]
    return layout.shape[placement.dim] % edge == 0
