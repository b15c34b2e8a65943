"""Where every parameter of a bucket lies: in a shard, in the gathered buffer, in the reduce buffer.

Level 4 of the data flow: pure. Takes shapes and a number of ranks; gives a `Layout` that buffers make views
of. A buffer is rows, one a rank; a row is what that rank sends to a gather or receives from a reduction.

    two matrices, w (4, 2) and b (3,), Shard(0) over 2 ranks; a row is a multiple of ALIGN elements:

            |<- w ->|<- b ->|                 |<---- w ---->|<- b ->|
    row 0   | w0 w1 | b0 b1 |    unsharded    | w0 w1 w2 w3 | b0 b1 b2
    row 1   | w2 w3 | b2  . |       =         one segment copies w's columns, one b's
                                              (ragged layouts have no segments: the rows *are* the parameters)

A reduce buffer has the rows of the trainable parameters only, and a tail of flags behind each row. Where
ranks send to one another in pairs, a large gradient needs no row: its parts go to their owners directly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardkit.mesh import DataAxes
from shardkit.plan import BucketPlan

ALIGN = 16  # elements: 16 bytes in every dtype, so that a plan does not depend on it


@dataclass(frozen=True, slots=True)
class ShardedShape:
    """What an interleaved layout needs to know: the unsharded shape, the dim that is cut."""

    name: str
    shape: tuple[int, ...]
    dim: int


class RaggedParam(NamedTuple):
    """A parameter of a ragged plan: its unsharded shape, and that of this rank's part."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RaggedSource:
    """What a ragged layout is made from: a bucket's plan and its parameters, in definition order."""

    plan: BucketPlan
    params: tuple[RaggedParam, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A strided copy between one parameter (contiguous, from its first element) and the rows of a buffer."""

    size: tuple[int, ...]
    param_offset: int
    param_strides: tuple[int, ...]
    rows_offset: int
    rows_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Elements of a buffer that no parameter writes: `num_rows` pieces of `numel`, one row apart."""

    offset: int
    num_rows: int
    numel: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: elements from the start of this rank's row, and of the unsharded buffer."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    shard_offset: int
    unsharded_offset: int
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of one bucket over `num_ranks` ranks, as `rank` sees them."""

    num_ranks: int
    rank: int
    row_numel: int  # the tail included
    tail_numel: int
    unsharded_numel: int
    in_place: bool  # the rows are the unsharded parameters: nothing is copied between them
    slots: tuple[Slot, ...]
    gaps: tuple[Gap, ...]
    columns: tuple[
        tuple[int, int], ...
    ]  # (numel, slot index or -1 for a gap): the row as whole columns, or ()
    source: tuple[ShardedShape, ...] | RaggedSource  # what it was made from

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return self.num_ranks * self.row_numel

    @property
    def padding_numel(self) -> int:
        """Elements of all rows that belong to no parameter, tails left out."""
        return self.numel - self.num_ranks * self.tail_numel - sum(slot.numel for slot in self.slots)

    def describe(self) -> list[str]:
        """One line a parameter, the same on every rank of the group where the plans agree."""
        head = f"{self.num_ranks} ranks, rows of {self.row_numel}"
        return [f"{slot.name}: {slot.shape} at {slot.unsharded_offset} in {head}" for slot in self.slots]


def interleaved_layout(
    params: Sequence[ShardedShape], num_ranks: int, rank: int, *, tail_numel: int = 0
) -> Layout:
    """`Shard(dim)`: every rank's row holds its chunk of every parameter, cut as `torch.chunk` cuts.

    The last chunks may be short or empty on dim 0; other dims divide evenly (`params.py` has refused the
    rest).
    """
    chunks = [_chunk_numel(param, num_ranks) for param in params]
    steps = [_aligned(chunk) if num_ranks == 1 else chunk for chunk in chunks]  # one row is the parameters
    row_numel = _aligned(sum(steps) + tail_numel)
    slots: dict[int, Slot] = {}
    gaps: list[Gap] = []
    columns: list[tuple[int, int]] = []
    offset = unsharded_offset = 0
    for index in sorted(range(len(params)), key=lambda i: chunks[i] % ALIGN != 0):  # odd sizes shift no other
        param = params[index]
        slots[index] = _interleaved_slot(param, num_ranks, rank, row_numel, offset, unsharded_offset)
        columns.append((chunks[index], index))
        gaps += _gaps_of_short_chunks(param, num_ranks, row_numel, offset)
        if steps[index] > chunks[index]:
            gaps.append(Gap(offset + chunks[index], 1, steps[index] - chunks[index]))
        offset += steps[index]
        unsharded_offset += _aligned(num_ranks * chunks[index])
    if pad := row_numel - tail_numel - offset:
        gaps.append(Gap(offset, num_ranks, pad))
        columns.append((pad, -1))
    by_rows = all(param.dim == 0 for param in params) and tail_numel == 0
    return Layout(
        num_ranks=num_ranks,
        rank=rank,
        row_numel=row_numel,
        tail_numel=tail_numel,
        unsharded_numel=unsharded_offset,
        in_place=num_ranks == 1 or (len(params) == 1 and by_rows and columns == [(row_numel, 0)]),
        slots=tuple(slots[index] for index in range(len(params))),
        gaps=tuple(gaps),
        columns=tuple(columns) if by_rows and num_ranks > 1 else (),
        source=tuple(params),
    )


def ragged_layout(source: RaggedSource, rank: int, indices: Sequence[int], *, tail_numel: int = 0) -> Layout:
    """Rows as the planner packed them: laid end to end, without their tails, they are the parameters.

    w (4, 2) in blocks of a row, b (3,), over 2 ranks        row 0   | w0 w1 w2 |
                                                             row 1   | w3  b  . |
    """
    plan = source.plan
    rows_numel = plan.num_ranks * plan.shard_numel  # without tails
    row_numel = _aligned(plan.shard_numel + tail_numel) if tail_numel else plan.shard_numel

    def pieces(start: int, numel: int) -> tuple[Segment, ...]:
        return _ragged_segments(start, numel, plan.shard_numel, row_numel)

    slots = []
    for name, shape, local_shape in (source.params[index] for index in indices):
        start, local = plan.starts[name], plan.local_range(name, rank)
        slots.append(
            Slot(name, shape, local_shape, local.start_in_shard, start, pieces(start, math.prod(shape)))
        )
    taken = sorted((plan.starts[slot.name], slot.numel) for slot in slots)
    ends = [0, *(start + numel for start, numel in taken)]
    holes = [(a, b - a) for a, b in zip(ends, [*(start for start, _ in taken), rows_numel], strict=True)]
    gaps = [_gap_of(segment) for start, numel in holes for segment in pieces(start, numel)]
    if row_numel > plan.shard_numel + tail_numel:
        gaps.append(Gap(plan.shard_numel, plan.num_ranks, row_numel - plan.shard_numel - tail_numel))
    return Layout(
        num_ranks=plan.num_ranks,
        rank=rank,
        row_numel=row_numel,
        tail_numel=tail_numel,
        unsharded_numel=rows_numel,
        in_place=row_numel == plan.shard_numel,
        slots=tuple(slots),
        gaps=tuple(gaps),
        columns=(),
        source=source,
    )


class DirectParts(NamedTuple):
    """A gradient that goes to its owners in contiguous parts, one a rank."""

    numels: tuple[int, ...]
    local_shape: tuple[int, ...]


class Place(NamedTuple):
    """This rank's part of a gradient in what it receives."""

    offset: int
    local_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """What reduces the gradients of some of a bucket's parameters, and what a rank receives of them.

    received by rank r      | its part of one direct | of another | .. | row r: the others, and the flags |
    """

    rows: Layout  # of what is not direct, in definition order; two flags for each, direct or not
    direct: dict[int, DirectParts]  # by the position among these parameters
    places: tuple[Place, ...]  # of each in what this rank receives
    row_offset: int  # where its row begins there
    row_numel: int  # elements that it receives; the last `tail_numel` are the flags
    tail_numel: int

    @property
    def direct_numel(self) -> int:
        """Elements of all gradients that need no rows."""
        return sum(sum(parts.numels) for parts in self.direct.values())

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends."""
        own = sum(parts.numels[self.rows.rank] for parts in self.direct.values())
        return self.direct_numel - own + (self.rows.num_ranks - 1) * self.rows.row_numel


def reduce_layout(layout: Layout, indices: Sequence[int], direct: Collection[int] = ()) -> ReduceLayout:
    """How the gradients of some of a layout's parameters are reduced.

    Args:
        direct: those of `indices` whose parts go straight to their owners; each of `can_be_direct`.
    """
    rank, source, tail_numel = layout.rank, layout.source, 2 * len(indices)
    others = [index for index in indices if index not in direct]
    if not isinstance(source, RaggedSource):
        shapes = [source[index] for index in others]
        rows = interleaved_layout(shapes, layout.num_ranks, rank, tail_numel=tail_numel)
    elif direct:
        rows = _close_rows(source, rank, others, tail_numel)
    else:
        rows = ragged_layout(source, rank, others, tail_numel=tail_numel)
    parts = {
        position: DirectParts(_part_numels(layout, index), layout.slots[index].local_shape)
        for position, index in enumerate(indices)
        if index in direct
    }
    places, offset, slots = [], 0, iter(rows.slots)
    start_of_row = sum(_aligned(part.numels[rank]) for part in parts.values())
    for position in range(len(indices)):
        if position in parts:
            places.append(Place(offset, parts[position].local_shape))
            offset += _aligned(parts[position].numels[rank])
        else:
            slot = next(slots)
            places.append(Place(start_of_row + slot.shard_offset, slot.local_shape))
    row_numel = start_of_row + rows.row_numel
    return ReduceLayout(rows, parts, tuple(places), start_of_row, row_numel, tail_numel)


def can_be_direct(layout: Layout, index: int) -> bool:
    """Whether every rank's part of the parameter is contiguous in the whole."""
    return isinstance(layout.source, RaggedSource) or layout.source[index].dim == 0


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """What a bucket is made from: places, ranks, dtypes, devices."""

    layout: Layout
    axes: DataAxes
    dtype: torch.dtype  # at rest
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    device: torch.device  # of compute
    shard_device: torch.device  # the CPU where shards are offloaded
    pin_memory: bool = False
    is_extended: bool = False  # its parameters' local tensors say themselves what to gather


def digest(lines: Sequence[str]) -> str:
    """sha256 over a description, the same in every process."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def _chunk_rows(param: ShardedShape, num_ranks: int) -> int:
    return -(-param.shape[param.dim] // num_ranks)


def _suffix_numel(param: ShardedShape) -> int:
    return math.prod(param.shape[param.dim + 1 :])


def _chunk_numel(param: ShardedShape, num_ranks: int) -> int:
    return math.prod(param.shape[: param.dim]) * _chunk_rows(param, num_ranks) * _suffix_numel(param)


def _interleaved_slot(
    param: ShardedShape, num_ranks: int, rank: int, row_numel: int, offset: int, unsharded_offset: int
) -> Slot:
    size, chunk = param.shape[param.dim], _chunk_rows(param, num_ranks)
    local_rows = max(0, min(chunk, size - rank * chunk))
    return Slot(
        name=param.name,
        shape=param.shape,
        local_shape=(*param.shape[: param.dim], local_rows, *param.shape[param.dim + 1 :]),
        shard_offset=offset,
        unsharded_offset=unsharded_offset,
        segments=_row_segments(param, num_ranks, row_numel, offset)
        if param.dim == 0
        else (_column_segment(param, num_ranks, row_numel, offset),),
    )


def _row_segments(param: ShardedShape, num_ranks: int, row_numel: int, offset: int) -> tuple[Segment, ...]:
    """Cut on dim 0: the ranks with a whole chunk in one copy, and the rank with a short one in another."""
    piece = _chunk_numel(param, num_ranks)
    if piece == 0:
        return ()
    num_full, rest = divmod(math.prod(param.shape), piece)
    segments = []
    if num_full:
        segments.append(Segment((num_full, piece), 0, (piece, 1), offset, (row_numel, 1)))
    if rest:
        segments.append(Segment((rest,), num_full * piece, (1,), num_full * row_numel + offset, (1,)))
    return tuple(segments)


def _column_segment(param: ShardedShape, num_ranks: int, row_numel: int, offset: int) -> Segment:
    """Cut on another dim: (rank, before, chunk, after), where the parameter has `before` outermost."""
    before, after = math.prod(param.shape[: param.dim]), _suffix_numel(param)
    chunk = _chunk_rows(param, num_ranks)
    return Segment(
        size=(num_ranks, before, chunk, after),
        param_offset=0,
        param_strides=(chunk * after, num_ranks * chunk * after, after, 1),
        rows_offset=offset,
        rows_strides=(row_numel, chunk * after, after, 1),
    )


def _gaps_of_short_chunks(param: ShardedShape, num_ranks: int, row_numel: int, offset: int) -> list[Gap]:
    """What the ranks with a short or an empty chunk leave open of their column."""
    piece = _chunk_numel(param, num_ranks)
    if param.dim != 0 or piece == 0:
        return []
    num_full, rest = divmod(math.prod(param.shape), piece)
    gaps = []
    if rest:
        gaps.append(Gap(num_full * row_numel + offset + rest, 1, piece - rest))
        num_full += 1
    if num_full < num_ranks:
        gaps.append(Gap(num_full * row_numel + offset, num_ranks - num_full, piece))
    return gaps


def _ragged_segments(start: int, numel: int, shard_numel: int, row_numel: int) -> tuple[Segment, ...]:
    """Elements [start, start + numel) of rows without tails: part of a row, whole rows, part of a row."""
    segments = []
    done = 0
    while done < numel:
        row, offset = divmod(start + done, shard_numel)
        num_whole = (numel - done) // shard_numel if offset == 0 else 0
        piece = min(shard_numel - offset, numel - done)
        place = row * row_numel + offset
        if num_whole:
            size = (num_whole, shard_numel)
            segments.append(Segment(size, done, (shard_numel, 1), place, (row_numel, 1)))
        else:
            segments.append(Segment((piece,), done, (1,), place, (1,)))
        done += max(num_whole, 1) * piece
    return tuple(segments)


def _close_rows(source: RaggedSource, rank: int, indices: Sequence[int], tail_numel: int) -> Layout:
    """Rows of a few of a plan's parameters, each rank's parts close together: the others leave no holes."""
    plan, names = source.plan, [source.params[index].name for index in indices]
    by_start = sorted(names, key=plan.starts.__getitem__)
    parts = {name: [plan.local_range(name, r) for r in range(plan.num_ranks)] for name in names}
    steps = {name: [_aligned(part.numel) for part in parts[name]] for name in names}
    used = [sum(steps[name][r] for name in names) for r in range(plan.num_ranks)]
    row_numel = _aligned(max(used) + tail_numel)
    offsets: dict[str, list[int]] = {}
    ends = [0] * plan.num_ranks
    for name in by_start:
        offsets[name], ends = ends, [end + step for end, step in zip(ends, steps[name], strict=True)]
    gaps = [Gap(r * row_numel + used[r], 1, row_numel - tail_numel - used[r]) for r in range(plan.num_ranks)]
    slots = []
    for name, shape, local_shape in (source.params[index] for index in indices):
        segments = []
        for r, (part, offset) in enumerate(zip(parts[name], offsets[name], strict=True)):
            place = r * row_numel + offset
            gaps.append(Gap(place + part.numel, 1, _aligned(part.numel) - part.numel))
            if part.numel:
                segments.append(Segment((part.numel,), part.start_in_tensor, (1,), place, (1,)))
        slots.append(Slot(name, shape, local_shape, offsets[name][rank], plan.starts[name], tuple(segments)))
    return Layout(
        num_ranks=plan.num_ranks,
        rank=rank,
        row_numel=row_numel,
        tail_numel=tail_numel,
        unsharded_numel=plan.num_ranks * plan.shard_numel,
        in_place=False,
        slots=tuple(slots),
        gaps=tuple(gap for gap in gaps if gap.numel),
        columns=(),
        source=source,
    )


def _part_numels(layout: Layout, index: int) -> tuple[int, ...]:
    """Elements of one parameter that each rank owns, in the order of the ranks."""
    if isinstance(layout.source, RaggedSource):
        plan, name = layout.source.plan, layout.source.params[index].name
        return tuple(plan.local_numels(name))
    param = layout.source[index]
    numel, chunk = math.prod(param.shape), _chunk_numel(param, layout.num_ranks)
    return tuple([max(0, min(chunk, numel - rank * chunk)) for rank in range(layout.num_ranks)])


def _gap_of(segment: Segment) -> Gap:
    num_rows = segment.size[0] if len(segment.size) == 2 else 1
    return Gap(segment.rows_offset, num_rows, segment.size[-1])
