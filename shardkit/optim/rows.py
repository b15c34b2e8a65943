"""A parameter's local tensor as whole rows, and state tensors that lie where those rows lie.

Facts read from layouts; nothing here communicates, and what is refused is refused by what all ranks know. A
row is the last dim of a matrix or of a stack of them, and all of a convolution's filter:

    (out, in)  (experts, out, in)  (out, in, kh, kw)      cut after the   1st  2nd  1st   dim

State of a row has the parameter's placements, with another number of columns: (300, 600) with rows 0..179 on
rank 0 and the others on rank 1 has scales (300, 3), rows 0..179 on rank 0. Checkpoints then go to any number
of ranks as those of the parameter do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardkit._torch import strided_shard
from shardkit.boxes import Layout, local_boxes, local_shape
from shardkit.optim.pieces import num_stack_dims
from shardkit.optim.placed import Placed
from shardkit.placement import RaggedShard, contiguous_stride


class Rows(NamedTuple):
    """How the local tensor of a parameter is read."""

    num_rows: int
    num_cols: int
    first_place: Tensor | None  # (num_rows,) int64: the row-major global index of each row's first element
    scale_of_row: Tensor | None  # (num_rows,) int64: which local row of scales; None where each has its own

    def split(self, block: int) -> Rows:
        """Every block as a row, if rows are whole numbers of blocks: then rows of any length go together."""
        if self.num_cols % block or self.num_cols == block:
            return self
        first_place = self.first_place
        if first_place is not None:
            starts = torch.arange(0, self.num_cols, block, device=first_place.device)
            first_place = (first_place[:, None] + starts).flatten()
        return Rows(self.num_rows * (self.num_cols // block), block, first_place, None)


def row_dims(shape: Sequence[int]) -> int:
    """How many dims of `shape` count its rows."""
    return num_stack_dims(shape) + 1


def num_cols(shape: Sequence[int]) -> int:
    """Elements in a row of a tensor of `shape`."""
    return math.prod(shape[row_dims(shape) :])


def rows_of(at: Placed, tile_rows: int) -> Rows:
    """The rows that this rank holds, each cut at most at the edge of a block of columns.

    Args:
        at: of a parameter that `require_whole_blocks` accepts.
        tile_rows: rows that share a scale.
    """
    layout, shape = at.layout, at.layout.shape
    count = row_dims(shape)
    uncut = tuple(Replicate() if cuts(p, len(shape) - 1, shape) else p for p in layout.placements)
    numbers = places(replace(layout, shape=(*shape[:count], 1), placements=uncut), at.me).view(-1)
    boxes = local_boxes(layout, at.me)
    first_col = boxes[0].offset[-1] if boxes and len(shape) < 4 else 0
    local_cols = num_cols(shape) if len(shape) > 3 else local_shape(layout, at.me)[-1]
    scale_of_row = None
    if tile_rows > 1:
        matrix_rows = shape[count - 1]
        tiles = (
            numbers // matrix_rows * math.ceil(matrix_rows / tile_rows) + numbers % matrix_rows // tile_rows
        )
        scale_of_row = torch.unique_consecutive(tiles, return_inverse=True)[1].to(at.device)
    first_place = (numbers * num_cols(shape) + first_col).to(at.device)
    return Rows(len(numbers), local_cols, first_place, scale_of_row)


def elements_of(at: Placed) -> Rows:
    """The local elements, each as a row of its own: for parameters that are not stored in blocks."""
    first_place = places(at.layout, at.me).view(-1).to(at.device)
    return Rows(len(first_place), 1, first_place, None)


def places(layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    """The row-major global index, int64, of every element of the local tensor at `coordinate`."""
    found = torch.empty(local_shape(layout, coordinate), dtype=torch.int64)
    strides = contiguous_stride(layout.shape)
    for box in local_boxes(layout, coordinate):
        place = torch.zeros((), dtype=torch.int64)
        for start, size, stride in zip(box.offset, box.size, strides, strict=True):
            place = place.unsqueeze(-1) + torch.arange(start, start + size) * stride
        box.view(found).copy_(place)
    return found


def zeros_in_rows(at: Placed, cols: int, *, tile_rows: int, dtype: torch.dtype) -> Tensor:
    """Zeros of `cols` columns a row, or a tile of rows, laid out as the rows of a parameter."""
    shape, count = at.layout.shape, row_dims(at.layout.shape)
    num_tiles = math.ceil(shape[count - 1] / tile_rows)
    placements = tuple(_of_tiles(placement, shape, tile_rows) for placement in at.layout.placements)
    layout = Layout((*shape[: count - 1], num_tiles, cols), at.layout.mesh_shape, placements)
    return at.zeros(layout, dtype, at.device)


def require_whole_blocks(at: Placed, *, block: int, tile_rows: int) -> None:
    """Raise unless every rank holds whole blocks of the rows of a parameter.

    Args:
        at: of a parameter of two dims or more.
        block: columns in a block.
        tile_rows: rows in a block.

    Raises:
        ValueError: a shard boundary cuts a block.
        NotImplementedError: two mesh axes cut the dim along which the blocks lie.
    """
    layout, shape = at.layout, at.layout.shape
    count = row_dims(shape)
    cut = [(axis, p) for axis, p in enumerate(layout.placements) if not isinstance(p, Replicate)]
    fact = f"param {at.name!r}: shape {shape} placed {layout.placements}"
    for dim, edge in ((len(shape) - 1, block), (count - 1, tile_rows)):
        if edge > 1 and sum(cuts(placement, dim, shape) for _, placement in cut) > 1:
            raise NotImplementedError(
                f"{fact} is cut along dim {dim} by two mesh axes, where blocks of {edge} lie. Shard it on "
                "one of them, or give it a group of its own with min_numel above its size, keeping float32."
            )
    for axis, placement in cut:
        if not _keeps_blocks(placement, shape, layout.mesh_shape[axis], block, tile_rows):
            wish = f"Blocks({tile_rows})" if tile_rows > 1 else "Blocks()"
            raise ValueError(
                f"{fact} has blocks of {tile_rows} x {block} on two ranks. Shard it by whole rows, with "
                f"shard_placement_fn=lambda p: {wish}, or give it a group of its own with min_numel above "
                "its size, which keeps float32 moments."
            )


def cuts(placement: Placement, dim: int, shape: Sequence[int]) -> bool:
    """Whether ranks with this placement hold different parts of `dim`; a ragged prefix cuts all its dims."""
    strided = strided_shard(placement)
    if isinstance(placement, RaggedShard):
        return dim < len(placement.dims)
    if strided is not None:
        return strided[0] % len(shape) == dim
    return isinstance(placement, Shard) and placement.dim % len(shape) == dim


def _keeps_blocks(
    placement: Placement, shape: tuple[int, ...], num_ranks: int, block: int, tile_rows: int
) -> bool:
    """Whether all boundaries of one mesh axis are edges of blocks."""
    count = row_dims(shape)
    if isinstance(placement, RaggedShard):
        if len(placement.dims) < count:
            return True
        return len(placement.dims) == count and all(
            edge % shape[count - 1] % tile_rows == 0 for edge in accumulate(placement.local_units)
        )
    for dim in range(count - 1, len(shape)):
        if not cuts(placement, dim, shape):
            continue
        edge = tile_rows if dim == count - 1 else block
        inside = dim != count - 1 and len(shape) > 3  # a filter of a convolution is one row
        chunk = math.ceil(shape[dim] / num_ranks)
        return not inside and (edge == 1 or (isinstance(placement, Shard) and chunk % edge == 0))
    return True


def _of_tiles(placement: Placement, shape: tuple[int, ...], tile_rows: int) -> Placement:
    """The placement of one row a tile, where `placement` lays out all rows."""
    count = row_dims(shape)
    if not isinstance(placement, RaggedShard) or tile_rows == 1 or len(placement.dims) < count:
        return placement
    matrix_rows = shape[count - 1]
    edges = [
        edge // matrix_rows * math.ceil(matrix_rows / tile_rows) + edge % matrix_rows // tile_rows
        for edge in accumulate(placement.local_units, initial=0)
    ]
    return RaggedShard(placement.dims, tuple(stop - start for start, stop in pairwise(edges)))
