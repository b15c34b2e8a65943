"""GradBuffer: unsharded gradients on their way into one reduction.

Level 10 of the data flow: holds. Every gradient is written once into the rows that a reduce-scatter will
consume, with the cast to the reduce dtype, and is freed: a large one as soon as autograd has it, small ones
together when the unit's backward is over. Without gradient sync the rows simply stay, and the next
micro-batch adds to them in the reduce dtype. Behind each row is a tail of flags, summed by the same
reduction, that tells every rank which parameters were used somewhere and which were not.

    row of rank r   | its chunk of every trainable parameter | used: 1 1 0 | unused: 0 0 1 |

Two flags a parameter, not one: a sum of ones in bfloat16 stops at 256, but a positive sum stays positive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NoReturn

import torch
from torch import Tensor

from shardkit._torch import ReduceScatter, split_flat
from shardkit.buffer import FlatBuffer
from shardkit.layout import BucketSpec, Layout, Segment, reduce_layout
from shardkit.sharded_param import ShardedParam

_wants_grad = attrgetter("sharded.requires_grad")


class GradBuffer:
    """The rows of one bucket's gradients, from the first gradient to the reduction."""

    def __init__(self, params: Sequence[ShardedParam], spec: BucketSpec) -> None:
        self.params, self.spec = params, spec
        self.comm: ReduceScatter | None = None  # the user's, which allocates the rows too
        self.partial: Tensor | None = None  # (row_numel,), reduced over the shard axis, not over the replicas
        self.trainable: tuple[int, ...] = ()  # indices of the parameters in the rows
        self.layout: Layout | None = None
        self._buffer: FlatBuffer | None = None  # of the rows, where they do not become the gradients
        self._rows: Tensor | None = None  # (num_ranks * row_numel,)
        self._placed_in: Tensor | None = None  # the rows that `_places` are views of
        self._segments_of: dict[int, tuple[Segment, ...]] = {}
        self._whole: dict[int, tuple[int, ...]] = {}  # as what a gradient fills its place, all of it in order
        self._places: dict[int, list[Tensor]] = {}  # of each parameter in the rows, a tensor a segment
        self._gaps: list[Tensor] = []
        self._tails = self._all_used = torch.empty(0)  # (num_ranks, tail_numel), and what they mostly hold
        self._row_pieces: list[Tensor] = []  # meta tensors shaped as what follows one another in a row
        self._piece_of: list[int] = []  # which of them is the gradient of each trainable parameter
        self._used: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has been added since the last reduction."""
        return self._rows is None

    def add(self, grads: Mapping[int, Tensor]) -> None:
        """Write, or add, gradients (index of the parameter -> its unsharded gradient) into the rows."""
        if self._rows is None:
            self._allocate()
        new: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        used, places_of, whole = self._used, self._places, self._whole
        for index, grad in grads.items():
            places, parts = more if index in used else new
            places += places_of.get(index) or self._places_of(index)
            size = whole.get(index)
            if size is not None and grad.is_contiguous():
                parts.append(grad.view(*size))  # a third faster than view(size)
            else:
                parts += self._parts_of(index, grad)
        self._used.update(grads)
        if new[0]:
            torch._foreach_copy_(*new)
        if more[0]:
            torch._foreach_add_(*more)

    def sweep(self) -> None:
        """Take every `.grad` of a gathered parameter, whoever put it there: pipelining sets them by hand."""
        grads = {}
        for index, param in enumerate(self.params):
            unsharded = param.unsharded
            if unsharded is not None and (grad := unsharded.grad) is not None:
                unsharded.grad = None
                grads[index] = grad
        if grads:
            self.add(grads)

    def take(self) -> tuple[Tensor, bool]:
        """The rows (num_ranks * row_numel,), with unused parameters zero and flags written; now it is empty.

        The second result says whether every parameter had a gradient.
        """
        if self._rows is None:
            self._allocate()
        rows = self._rows
        assert rows is not None
        all_used = len(self._used) == len(self.trainable)
        unused = [] if all_used else [index for index in self.trainable if index not in self._used]
        if unused:
            torch._foreach_zero_([place for index in unused for place in self._places_of(index)])
        self._tails.copy_(_flags(self.trainable, unused, self.spec) if unused else self._all_used)
        self._rows = None
        self._used = set()
        return rows, not unused

    def split_row(self, row: Tensor) -> list[Tensor]:
        """This rank's part of every trainable parameter's gradient, views of a reduced row (row_numel,)."""
        views = split_flat(row, self._row_pieces)
        return [views[piece] for piece in self._piece_of]

    def free(self) -> None:
        """Give up the rows that were taken: the reduction has consumed them, or they live on as gradients."""
        if self._rows is not None:
            return
        if self._buffer is not None and self._placed_in is self._buffer.flat:
            self._buffer.free()
        else:  # not ours: what is cached must not keep them alive
            self._placed_in, self._places, self._gaps = None, {}, []
            self._tails = torch.empty(0)

    def drop(self) -> None:
        """Forget what was not reduced: the iteration failed."""
        self._rows = self.partial = None
        self._used = set()
        self.free()

    def _allocate(self) -> None:
        trainable = tuple([index for index, wants in enumerate(map(_wants_grad, self.params)) if wants])
        if self.layout is None or trainable != self.trainable:
            if self.partial is not None:
                switched = sorted(set(trainable) ^ set(self.trainable))
                _refuse_switch([self.params[index].name for index in switched])
            self.trainable, self._buffer, self._places = trainable, None, {}
            self.layout = reduce_layout(self.spec.layout, trainable)
            self._row_pieces, self._piece_of = _pieces_of_row(self.layout)
            slots = zip(trainable, self.layout.slots, strict=True)
            self._segments_of = {index: slot.segments for index, slot in slots}
            self._whole = {
                index: segments[0].size
                for index, segments in self._segments_of.items()
                if self.params[index].sharding.unsharded is None and _is_whole(segments)
            }
            self._all_used = _flags(trainable, (), self.spec)
        layout, spec = self.layout, self.spec
        if self.comm is not None:
            rows = self.comm.allocate((layout.numel,), dtype=spec.reduce_dtype, device=spec.device)
        elif layout.num_ranks == 1:  # the rows become the gradients
            rows = torch.empty(layout.numel, dtype=spec.reduce_dtype, device=spec.device)
        elif self._buffer is not None:
            self._buffer.allocate()
            rows = self._buffer.flat
        else:
            self._buffer = FlatBuffer(layout.numel, spec.reduce_dtype, spec.device)
            rows = self._buffer.flat
        if rows is not self._placed_in:
            self._placed_in, self._places = rows, {}
            strides = (layout.row_numel, 1)
            self._gaps = [rows.as_strided((g.num_rows, g.numel), strides, g.offset) for g in layout.gaps]
            tail = (layout.num_ranks, layout.tail_numel)
            self._tails = rows.as_strided(tail, strides, layout.row_numel - layout.tail_numel)
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        self._rows = rows

    def _places_of(self, index: int) -> list[Tensor]:
        """Where the gradient of a parameter goes in the rows."""
        if index not in self._places:
            assert self._rows is not None
            rows = self._rows
            places = [rows.as_strided(s.size, s.rows_strides, s.rows_offset) for s in self._segments(index)]
            self._places[index] = places
        return self._places[index]

    def _parts_of(self, index: int, grad: Tensor) -> list[Tensor]:
        """The gradient, cut as its places are."""
        sharding = self.params[index].sharding
        local = grad if sharding.unsharded is None else sharding.local_grad(grad)
        if not local.is_contiguous():  # as a sparse one is not
            local = (local.to_dense() if local.is_sparse else local).contiguous()
        segments = self._segments(index)
        if _is_whole(segments):
            return [local.view(segments[0].size)]
        start = local.storage_offset()
        return [local.as_strided(s.size, s.param_strides, start + s.param_offset) for s in segments]

    def _segments(self, index: int) -> tuple[Segment, ...]:
        segments = self._segments_of.get(index)
        if segments is None:
            raise RuntimeError(
                f"param {self.params[index].name!r}: requires_grad was switched on between micro-batches "
                "without gradient sync, whose buffer has no place for it. Switch it after a synced backward."
            )
        return segments


def _is_whole(segments: Sequence[Segment]) -> bool:
    """Whether one copy takes a contiguous gradient from its first element to its last."""
    return len(segments) == 1 and len(segments[0].size) <= 2


def _flags(trainable: Sequence[int], unused: Sequence[int], spec: BucketSpec) -> Tensor:
    """(2 * num_trainable,): ones for what was used, then ones for what was not."""
    used = [float(index not in unused) for index in trainable]
    flags = torch.tensor(used + [1.0 - flag for flag in used], dtype=spec.reduce_dtype)
    return flags.to(spec.device, non_blocking=True)  # else the host would wait for the stream


def _refuse_switch(names: Sequence[str]) -> NoReturn:
    """Other parameters cannot be added to the partial sum of those that were trainable."""
    raise RuntimeError(
        f"param {names}: requires_grad was switched between micro-batches whose all-reduce is deferred, so "
        "their sums do not match. Switch it after a backward with set_requires_all_reduce(True)."
    )


def _pieces_of_row(layout: Layout) -> tuple[list[Tensor], list[int]]:
    """The parameters' parts of a row, and the padding between them, in order; and where each parameter is."""
    pieces: list[Tensor] = []
    piece_of = [0] * len(layout.slots)
    end = 0
    for position in sorted(range(len(layout.slots)), key=lambda i: layout.slots[i].shard_offset):
        slot = layout.slots[position]
        start = slot.shard_offset if slot.local_numel else end
        if start > end:
            pieces.append(torch.empty(start - end, device="meta"))
        piece_of[position] = len(pieces)
        pieces.append(torch.empty(slot.local_shape, device="meta"))
        end = start + slot.local_numel
    return pieces, piece_of
