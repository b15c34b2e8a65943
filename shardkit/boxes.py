"""Where the local tensor of any mesh coordinate lies in the global tensor: a list of axis-aligned boxes.

Level 1 of the data flow: pure arithmetic. Checkpoints, redistribution, seeded initialisation and the
optimizers all read layouts through `local_boxes`, so that each placement (Shard, torch's _StridedShard,
RaggedShard, Replicate) is understood in one place. Whole rows are one box a rank; a cut inside rows gives a
head, a body and a tail. With the tensor (5, 3) cut as RaggedShard((0, 1), (4, 0, 11)), rank 0 holds

    | a0 a1 a2 |   box at (0, 0) of size (1, 3), local offset 0
    | b0       |   box at (1, 0) of size (1, 1), local offset 3
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import add, mul
from typing import NamedTuple

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from shardkit import _torch
from shardkit.placement import RaggedShard, contiguous_stride


class Box(NamedTuple):
    """A box of the global tensor and the view of a contiguous local tensor that holds it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    local_offset: int
    local_stride: tuple[int, ...]

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The part of the contiguous tensor `local` that lies in this box, sharing its memory."""
        return local.as_strided(self.size, self.local_stride, local.storage_offset() + self.local_offset)

    def within(self, shape: tuple[int, ...]) -> Box:
        """The same box as a view of the whole global tensor of `shape`."""
        stride = contiguous_stride(shape)
        return Box(self.offset, self.size, sum(map(mul, self.offset, stride)), stride)

    def intersect(self, other: Box) -> Box | None:
        """The overlap of two boxes, as a view of this one's local tensor; None if there is none."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(
            min(a + size_a, b + size_b)
            for a, size_a, b, size_b in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        if any(length <= 0 for length in size):
            return None
        skip = sum(
            (a - b) * stride for a, b, stride in zip(start, self.offset, self.local_stride, strict=True)
        )
        return Box(start, size, self.local_offset + skip, self.local_stride)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor on a mesh, without the mesh: all that decides which rank holds what.

    Args:
        shape: global shape.
        mesh_shape: ranks on each mesh axis.
        placements: one a mesh axis. A RaggedShard is applied last; the other axes cut from left to right.
        other_units: where tensor parallelism is uneven, the `local_units` of each other coordinate, as pairs
            (coordinate without the ragged axis, local_units).
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    other_units: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def ragged_axis(self) -> int | None:
        """The mesh axis with the RaggedShard."""
        return next((axis for axis, p in enumerate(self.placements) if isinstance(p, RaggedShard)), None)

    def ragged_at(self, coordinate: tuple[int, ...]) -> RaggedShard | None:
        """The RaggedShard as the ranks at `coordinate` see it."""
        axis = self.ragged_axis
        if axis is None:
            return None
        placement = self.placements[axis]
        assert isinstance(placement, RaggedShard)
        for other, units in self.other_units:
            if other == coordinate[:axis] + coordinate[axis + 1 :]:
                return RaggedShard(placement.dims, units, placement.block)
        return placement

    def check(self, coordinate: tuple[int, ...]) -> None:
        """Raise ValueError or NotImplementedError unless this rank can hold its part."""
        if len(self.placements) != len(self.mesh_shape):
            raise ValueError(
                f"expected one placement for each of {len(self.mesh_shape)} mesh axes, got {self.placements}."
            )
        if sum(isinstance(p, RaggedShard) for p in self.placements) > 1:
            raise NotImplementedError(f"{self.placements}: only one mesh axis can be ragged.")
        ragged, axis = self.ragged_at(coordinate), self.ragged_axis
        if ragged is not None and axis is not None:
            ragged.check(sharded_shape(self, coordinate), self.mesh_shape[axis])


def sharded_shape(layout: Layout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """What the axes other than the ragged one leave of the global shape: the tensor that is cut raggedly."""
    return tuple(sum(length for _, length in runs) for runs in _runs_of_dims(layout, coordinate))


def local_shape(layout: Layout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the local tensor at `coordinate`."""
    shape, axis = sharded_shape(layout, coordinate), layout.ragged_axis
    ragged = layout.ragged_at(coordinate)
    return shape if ragged is None or axis is None else ragged.local_shape(shape, coordinate[axis])


@lru_cache(maxsize=65536)
def local_boxes(layout: Layout, coordinate: tuple[int, ...]) -> tuple[Box, ...]:
    """The boxes that the local tensor at `coordinate` holds, in the order of its elements; none is empty.

    Mesh (dp=2, tp=2), shape (6, 2), placements (RaggedShard((0,), (1, 2)), Shard(0)), coordinate (1, 1): TP
    gives rows 3..5, of which dp rank 1 holds the last two, so one box at (4, 0) of size (2, 2).
    """
    runs = _runs_of_dims(layout, coordinate)
    shape = tuple(sum(length for _, length in dim_runs) for dim_runs in runs)
    stride = contiguous_stride(shape)
    ragged, axis = layout.ragged_at(coordinate), layout.ragged_axis
    if ragged is None or axis is None:
        start, pieces = 0, [((0,) * len(shape), shape)]
    else:
        unit_numel = math.prod(ragged.suffix(shape))
        start = ragged.start_unit(coordinate[axis]) * unit_numel
        pieces = list(_interval_boxes(start, ragged.local_units[coordinate[axis]] * unit_numel, shape))
    return tuple(
        Box(
            offset=tuple(global_start for global_start, _, _ in box),
            size=tuple(length for _, _, length in box),
            local_offset=sum(at * step for (_, at, _), step in zip(box, stride, strict=True)) - start,
            local_stride=stride,
        )
        for offset, size in pieces
        for box in product(*map(_runs_in, runs, offset, size))
        if all(length for _, _, length in box)
    )


def local_part(full: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """A copy of what `coordinate` holds of the global tensor `full`, as its local tensor."""
    local = full.new_empty(local_shape(layout, coordinate))
    for box in local_boxes(layout, coordinate):
        box.view(local).copy_(full[tuple(map(slice, box.offset, map(add, box.offset, box.size)))])
    return local


def _interval_boxes(
    start: int, numel: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, size) of the boxes that make up `numel` elements from `start` of a row-major tensor."""
    if not shape:
        if numel:
            yield (), ()
        return
    inner_numel, inner = math.prod(shape[1:]), shape[1:]
    while numel > 0:
        row, skip = divmod(start, inner_numel)
        if skip or numel < inner_numel:  # part of one row: its boxes are found one dim further in
            step = min(numel, inner_numel - skip)
            for offset, size in _interval_boxes(skip, step, inner):
                yield (row, *offset), (1, *size)
        else:
            step = numel - numel % inner_numel
            yield (row, *(0 for _ in inner)), (step // inner_numel, *inner)
        start, numel = start + step, numel - step


Runs = list[tuple[int, int]]  # (global start, length): what a coordinate keeps of one dim, in local order


def _runs_of_dims(layout: Layout, coordinate: tuple[int, ...]) -> list[Runs]:
    """What each dim keeps after the placements other than the ragged one, applied from left to right."""
    runs: list[Runs] = [[(0, size)] for size in layout.shape]
    for axis, placement in enumerate(layout.placements):
        num_ranks, rank = layout.mesh_shape[axis], coordinate[axis]
        if isinstance(placement, Shard):
            size = sum(length for _, length in runs[placement.dim])
            runs[placement.dim] = _cut(runs[placement.dim], *_chunk(size, num_ranks, rank))
        elif (strided := _torch.strided_shard(placement)) is not None:
            dim, split_factor = strided
            size = sum(length for _, length in runs[dim])
            kept: Runs = []
            for part in range(split_factor):
                part_start, part_size = _chunk(size, split_factor, part)
                start, length = _chunk(part_size, num_ranks, rank)
                kept += _cut(runs[dim], part_start + start, length)
            runs[dim] = kept
    return runs


def _chunk(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """(start, length) of a piece, as torch.chunk cuts: equal ones, then a short one, then empty ones."""
    full = -(-size // num_chunks)
    start = min(size, full * index)
    return start, min(full, size - start)


def _cut(runs: Runs, start: int, length: int) -> Runs:
    """The runs of `length` places from local place `start`."""
    return [(at, count) for at, _, count in _runs_in(runs, start, length) if count]


def _runs_in(runs: Sequence[tuple[int, int]], start: int, length: int) -> list[tuple[int, int, int]]:
    """(global start, local start, length) of each run's overlap with local places start .. start+length."""
    found, begin = [], 0
    for global_start, count in runs:
        low, high = max(start, begin), min(start + length, begin + count)
        if low < high:
            found.append((global_start + low - begin, low, high - low))
        begin += count
    return found
