"""Which parts of a parameter an optimizer works on whole, and which ranks hold them.

Pure: shapes and layouts in, boxes out. A *piece* is what must come together on one rank to be worked on: a
matrix for Muon. It may lie on one rank already, or be cut:

    w (6, 4) as RaggedShard((0,), (1, 5, 0)), one piece         rank 0 holds row 0        box (0, 0) (1, 4)
                                                                rank 1 holds rows 1..5    box (1, 0) (5, 4)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit._torch import cuts_dim
from shardkit.boxes import Box, Layout, local_boxes, sharded_shape
from shardkit.layout import digest
from shardkit.placement import RaggedShard, contiguous_stride


class Region(NamedTuple):
    """A box of a global tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.size)

    def box(self) -> Box:
        """The region as a contiguous tensor of its own."""
        return Box(self.offset, self.size, 0, contiguous_stride(self.size))

    def label(self, shape: Sequence[int]) -> str:
        """Which part of a tensor of `shape` it is: [2] of a stack, [0:128] of the rows, "" for all of it."""
        words: list[str] = []
        for start, size, whole in zip(*self, shape, strict=True):
            if size == whole:
                words.append(":")
            else:
                words.append(str(start) if size == 1 and not words else f"{start}:{start + size}")
        while words and words[-1] == ":":
            words.pop()
        return f"[{', '.join(words)}]" if words else ""


class Matrix(NamedTuple):
    """A part of a parameter that is one matrix, of `rows` x `cols` elements."""

    region: Region
    rows: int
    cols: int


class Share(NamedTuple):
    """What one rank, `holder` by its index among those that cut the parameter, holds of a region."""

    holder: int
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        """Elements held."""
        return sum(math.prod(box.size) for box in self.boxes)


class Shares(tuple[Share, ...]):
    """Who holds what of a region, in rank order.

    Matrices of layers that are cut alike have one such object in common, so what is worked out here is worked
    out once a model, not once a layer: a block of Shampoo may lie on hundreds of ranks.
    """

    @cached_property
    def numel_of(self) -> dict[int, int]:
        """Elements held, by holder."""
        return {share.holder: share.numel for share in self}

    @cached_property
    def copies(self) -> tuple[tuple[Share, ...], ...]:
        """The shares, those that are copies of one another together."""
        alike: dict[tuple[object, ...], list[Share]] = {}
        for share in self:
            alike.setdefault(tuple((box.offset, box.size) for box in share.boxes), []).append(share)
        return tuple(map(tuple, alike.values()))

    @cached_property
    def text(self) -> str:
        """All that ranks must agree on; of many shares a digest."""
        text = str([(share.holder, [box[:2] for box in share.boxes]) for share in self])
        return text if len(self) <= 16 else f"{len(self)} shares, {digest([text])[:16]}"


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a piece: where it lies, and in which dtype it travels."""

    region: Region
    dtype: torch.dtype
    shares: Shares


class Home(NamedTuple):
    """The rank that has the state of a piece and so works on it, and where in its local tensor it is."""

    rank: int  # index among those that cut the parameter
    slot: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A unit of work: fields that come together on a rank, are changed there, and go back.

    Args:
        param: fqn of the parameter.
        label: which part of it, "" for all of it.
        rows, cols: of the matrix.
        fields: the first is the parameter's own; others are state that goes with it.
        flops: floating-point operations of the work on it.
        home: where its own state is; None if any rank may work on it.
        number: spreads work over steps; it follows from the parameter's name and the piece's place in it.
    """

    param: str
    label: str
    rows: int
    cols: int
    fields: tuple[Field, ...]
    flops: float
    home: Home | None = None
    number: int = 0

    @property
    def name(self) -> str:
        """The parameter and the part."""
        return self.param + self.label

    @property
    def nbytes(self) -> int:
        """Bytes on the wire if all of it travels once."""
        return sum(field.region.numel * field.dtype.itemsize for field in self.fields)


def matrices_of(
    name: str,
    shape: Sequence[int],
    *,
    heads: int | None = None,
    split_rows: Sequence[int] | None = None,
    flatten: bool | None = None,
) -> tuple[Matrix, ...]:
    """The matrices in a parameter.

    shape (8, 6)                     one of 8 x 6
    shape (8, 6), heads=2            two of 4 x 6, the row bands of the heads
    shape (8, 6), split_rows=(4, 2, 2)    of 4 x 6, 2 x 6, 2 x 6: fused q, k, v; with heads as well, each
    band is cut into heads of shape[0] / heads rows
    shape (3, 8, 6)                  three of 8 x 6, the experts
    shape (8, 3, 5, 5)               one of 8 x 75, a convolution; so is (8, 3, 5) with flatten=True

    Raises:
        ValueError: the parameter has fewer than two dims, or the rows do not divide so.
    """
    shape = tuple(shape)
    if len(shape) < 2:
        raise ValueError(
            f"param {name!r}: expected a matrix, a stack (experts, rows, cols) or a convolution, got shape "
            f"{shape}. Put it in a group with algorithm='adamw'."
        )
    stack = shape[: num_stack_dims(shape, flatten)]
    of_matrix = shape[len(stack) :]
    bands = _row_bands(name, of_matrix[0], heads, split_rows)
    cols = math.prod(of_matrix[1:])
    inner = (0,) * len(of_matrix[1:])
    return tuple(
        Matrix(
            Region((*place, start, *inner), ((1,) * len(stack)) + (rows, *of_matrix[1:])),
            rows,
            cols,
        )
        for place in product(*map(range, stack))
        for start, rows in bands
    )


def cut_axes(layout: Layout) -> tuple[int, ...]:
    """The mesh axes whose ranks hold different parts."""
    return tuple(
        axis
        for axis, (placement, size) in enumerate(zip(layout.placements, layout.mesh_shape, strict=True))
        if size > 1 and not isinstance(placement, Replicate)
    )


def coordinates_on(layout: Layout, axes: Sequence[int], me: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The places that differ from `me` in `axes` alone, in rank order: an index is a place in this tuple."""
    ranges = [range(n) if axis in axes else [me[axis]] for axis, n in enumerate(layout.mesh_shape)]
    return tuple(product(*ranges))


@lru_cache(maxsize=8192)
def shares_of(layout: Layout, region: Region, axes: tuple[int, ...], me: tuple[int, ...]) -> Shares:
    """Who holds what of `region`, by index in `coordinates_on(layout, axes, me)`; empty shares left out."""
    coordinates, wanted = coordinates_on(layout, axes, me), region.box()
    shares = []
    for index in _candidates(layout, region, axes, len(coordinates)):
        found = [box.intersect(wanted) for box in local_boxes(layout, coordinates[index])]
        boxes = tuple(box for box in found if box is not None)
        if boxes:
            shares.append(Share(index, boxes))
    return Shares(shares)


def num_stack_dims(shape: Sequence[int], flatten: bool | None = None) -> int:
    """Leading dims that count matrices: one of a stack of experts, none of a convolution or a matrix."""
    is_stack = len(shape) == 3 if flatten is None else not flatten
    return len(shape) - 2 if is_stack else 0


def row_layout(layout: Layout, flatten: bool | None = None) -> Layout:
    """Where state with one number a row of each matrix lies: as the rows of the parameter.

    A row that is cut belongs to the rank with its first element; a mesh axis that cuts columns replicates it.
    Where ragged cuts differ by tensor-parallel rank, rows have no owner in common, and every rank has all.
    """
    num_dims, row_dims = len(layout.shape), num_stack_dims(layout.shape, flatten) + 1
    ragged = next((p for p in layout.placements if isinstance(p, RaggedShard)), None)
    is_uneven = ragged is not None and any(units != ragged.local_units for _, units in layout.other_units)
    placements: list[Placement] = []
    for placement in layout.placements:
        if is_uneven:
            placements.append(Replicate())
        elif isinstance(placement, RaggedShard):
            placements.append(_rows_of_ragged(placement, layout, row_dims))
        elif any(cuts_dim(placement, dim) for dim in range(row_dims, num_dims)):
            placements.append(Replicate())
        else:
            placements.append(placement)
    shape = (*layout.shape[:row_dims], *(1 for _ in range(num_dims - row_dims)))
    return Layout(shape, layout.mesh_shape, tuple(placements))


def _rows_of_ragged(placement: RaggedShard, layout: Layout, row_dims: int) -> RaggedShard:
    if len(placement.dims) <= row_dims:
        return RaggedShard(placement.dims, placement.local_units)
    shape = sharded_shape(layout, (0,) * len(layout.mesh_shape))
    row_numel = math.prod(shape[row_dims:]) or 1
    ends = [-(-end // row_numel) for end in accumulate(placement.local_numels(shape))]
    units = tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
    return RaggedShard(tuple(range(row_dims)), units)


def _row_bands(
    name: str, num_rows: int, heads: int | None, split_rows: Sequence[int] | None
) -> list[tuple[int, int]]:
    """(start, rows) of what the rows of a matrix are split into."""
    parts = [num_rows] if split_rows is None else list(split_rows)
    if sum(parts) != num_rows:
        raise ValueError(
            f"param {name!r}: split_rows={tuple(parts)} sum to {sum(parts)}, but it has {num_rows} rows."
        )
    if heads is not None:
        head_rows = num_rows // heads if heads > 0 else 0
        if head_rows < 1 or num_rows % heads or any(part % head_rows for part in parts):
            raise ValueError(
                f"param {name!r}: heads={heads} do not divide {num_rows} rows, or a band of "
                f"{tuple(parts)}. Pass the number of heads that all rows together hold."
            )
        parts = [head_rows] * heads
    return [(end - part, part) for part, end in zip(parts, accumulate(parts), strict=True)]


def _candidates(layout: Layout, region: Region, axes: Sequence[int], num_places: int) -> Sequence[int]:
    """Indices that may hold part of the region: a contiguous few where one axis cuts, else all."""
    if len(axes) != 1 or any(
        not isinstance(p, Replicate) for axis, p in enumerate(layout.placements) if axis not in axes
    ):
        return range(num_places)
    placement = layout.placements[axes[0]]
    if isinstance(placement, RaggedShard):
        stride = contiguous_stride(layout.shape)
        start = sum(o * step for o, step in zip(region.offset, stride, strict=True))
        last = start + sum((n - 1) * step for n, step in zip(region.size, stride, strict=True))
        ends = _ends(placement, layout.shape)
        return range(bisect_right(ends, start), min(bisect_right(ends, last), num_places - 1) + 1)
    if type(placement) is Shard:
        rows = -(-layout.shape[placement.dim] // num_places)
        first = region.offset[placement.dim]
        return range(first // max(rows, 1), (first + region.size[placement.dim] - 1) // max(rows, 1) + 1)
    return range(num_places)


@lru_cache(maxsize=65536)
def _ends(placement: RaggedShard, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The element after the last one of each rank."""
    return tuple(accumulate(placement.local_numels(shape)))
