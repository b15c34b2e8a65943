"""RowGather: one bucket's rows on the wire, and the gathered bytes they become.

Level 10 of the data flow: holds and moves. It has at most one gather under way; which parameter is
registered, and when anything happens, is not its business.

    shard (at rest)  --cast, copy-->  own row  --all_gather-->  rows  --copy out-->  unsharded parameters
                     (only if they differ)         (in place for ragged layouts: rows are the parameters)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit._torch import AllGather
from shardkit.buffer import FlatBuffer, empty_flat
from shardkit.collectives import DONE, Pending, Route, all_gather
from shardkit.layout import BucketSpec, Layout
from shardkit.sharded_param import ShardedParam
from shardkit.streams import Streams


class RowGather:
    """Gathers a bucket's shard into the storage that its gathered parameters live in."""

    def __init__(self, params: Sequence[ShardedParam], spec: BucketSpec, route: Route | None) -> None:
        self.params, self.spec, self.route = tuple(params), spec, route
        numel = 0 if spec.is_extended else spec.layout.row_numel
        self.shard = FlatBuffer(numel, spec.dtype, spec.shard_device, pin=spec.pin_memory)
        if not self.shard.flat.is_meta:
            self.shard.flat.zero_()  # padding travels; let it be the same everywhere
        self.comm: AllGather | None = None  # the user's, which allocates the rows too
        self.small_group: dist.ProcessGroup | None = None  # gathers the pieces that `keep_piece` kept
        self.tensors: list[nn.Parameter] = []  # the gathered form of every parameter, once it is made
        self.unsharded: FlatBuffer | None = None
        self._rows: Tensor | None = None  # gathered, not yet copied out
        self.pending: Pending | None = None  # a gather that has been started and not been completed
        self._piece: Tensor | None = None  # of the rows, kept after forward
        self._transit: FlatBuffer | None = None  # of the rows, where they are ours and not the parameters
        self._copied_from: Tensor | None = None  # the rows that these are views of, and of the parameters
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.take_in(self.params)

    def take_in(self, new: Sequence[ShardedParam]) -> None:
        """Move the parts of parameters that are new, or that the user replaced, into the shard buffer."""
        for index, (param, slot) in enumerate(zip(self.params, self.spec.layout.slots, strict=True)):
            if param in new:
                param.place_in(self.shard, slot)
                param.unsharded = self.tensors[index] if self.tensors else None

    def start(self, label: str) -> None:
        """Send this rank's row. Collective over the shard axis, or `small_group` after `keep_piece`."""
        layout, route = self.spec.layout, self.route
        if layout.in_place and self.comm is None:
            rows = self._allocate_unsharded().flat  # the parameters' own bytes
        elif self.comm is not None:
            rows = new_rows(layout.numel, self.spec.compute_dtype, self.spec.device, self.comm)
        else:
            if self._transit is None:
                self._transit = FlatBuffer(layout.numel, self.spec.compute_dtype, self.spec.device)
            self._transit.allocate()
            rows = self._transit.flat
        self._rows = rows
        if self._piece is not None and self.small_group is not None and route is not None:
            self.pending = all_gather(rows, self._piece, replace(route, group=self.small_group), label)
            return
        row = self.shard.flat
        if layout.num_ranks == 1 or row.dtype != rows.dtype or row.device != rows.device:
            own = rows.narrow(0, layout.rank * layout.row_numel, layout.row_numel)
            row = own.copy_(row, non_blocking=True)
        self.pending = gather_rows(rows, row, self.route, self.comm, label)

    def complete(self) -> None:
        """Wait for the rows and copy the parameters out of them."""
        assert self.pending is not None
        self.pending.wait()
        if self._rows is not None:
            rows, self._rows = self._rows, None
            if self.unsharded is None or rows is not self.unsharded.flat:
                self._copy_out(rows, self._allocate_unsharded())
            if self._transit is not None:
                self._transit.free()

    def finish(self) -> None:
        """The gathered parameters are there for whoever computes."""
        self.pending = self._piece = None

    def drop(self) -> None:
        """Wait for a gather that nobody needs any more: its messages are under way on every rank."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = self._rows = None
            for buffer in (self.unsharded, self._transit):
                if buffer is not None:
                    buffer.free()

    def drop_piece(self) -> None:
        """Forget what was kept of values that are no more."""
        self._piece = None

    def free(self, streams: Streams) -> None:
        """Give the gathered bytes up, and a kept piece."""
        self._piece = None
        if self.unsharded is not None:
            streams.free_later(self.unsharded)

    def keep_piece(self, streams: Streams, num_ranks: int) -> None:
        """Free the gathered bytes but for this rank's piece of what `num_ranks` neighbours hold together."""
        assert self.unsharded is not None
        layout = self.spec.layout
        piece_numel = layout.numel // num_ranks
        rows = self.unsharded.flat if layout.in_place else _rows_from_params(layout, self.unsharded.flat)
        piece = rows[layout.rank % num_ranks * piece_numel :][:piece_numel].clone()
        self.free(streams)
        self._piece = piece

    def _allocate_unsharded(self) -> FlatBuffer:
        layout, spec = self.spec.layout, self.spec
        if self.unsharded is not None:
            self.unsharded.allocate()
            return self.unsharded
        numel = layout.numel if layout.in_place else layout.unsharded_numel
        self.unsharded = FlatBuffer(numel, spec.compute_dtype, spec.device)
        self.tensors = [
            param.make_unsharded(self.unsharded.tensor(slot.unsharded_offset, slot.shape))
            for param, slot in zip(self.params, layout.slots, strict=True)
        ]
        return self.unsharded

    def _copy_out(self, rows: Tensor, unsharded: FlatBuffer) -> None:
        layout = self.spec.layout
        if layout.in_place:  # but the user's collective has a buffer of its own
            unsharded.flat.copy_(rows)
            return
        if rows is not self._copied_from:
            self._copied_from = None if self.comm is not None else rows
            self._copies = _copies(layout, unsharded, rows)
        params, parts = self._copies
        if layout.columns and rows.device.type != "cpu":  # a single kernel
            sizes = [numel for numel, _ in layout.columns]
            torch.split_with_sizes_copy(rows.view(layout.num_ranks, -1), sizes, dim=1, out=params)
        else:
            torch._foreach_copy_(params, parts)


def new_rows(numel: int, dtype: torch.dtype, device: torch.device, comm: AllGather | None) -> Tensor:
    """A buffer to gather into, which the user's collective may allocate."""
    if comm is not None:
        return comm.allocate((numel,), dtype=dtype, device=device)
    return empty_flat(numel, dtype, device)


def gather_rows(
    rows: Tensor, row: Tensor, route: Route | None, comm: AllGather | None, label: str
) -> Pending:
    """Gather the `row` of every rank into `rows`. Collective over `route.group`: all ranks must call."""
    if route is None or rows.numel() == row.numel():
        return DONE
    if comm is not None:
        comm(output_tensor=rows, input_tensor=row, group=route.group, async_op=False)
        return DONE
    return all_gather(rows, row, route, label)


def _copies(layout: Layout, unsharded: FlatBuffer, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The parts of the parameters, or scratch for a gap, and the parts of the rows to be copied there."""
    with torch.inference_mode(False):
        if not layout.columns:
            pairs = _pairs(layout, unsharded.flat, rows)
            return [param for param, _ in pairs], [part for _, part in pairs]
        sizes = [numel for numel, _ in layout.columns]
        parts = rows.view(layout.num_ranks, -1).split_with_sizes(sizes, dim=1)
        shapes = [(layout.num_ranks, numel) for numel in sizes]
        params = [
            unsharded.flat.new_empty(shape)
            if index < 0
            else unsharded.tensor(layout.slots[index].unsharded_offset, shape)
            for shape, (_, index) in zip(shapes, layout.columns, strict=True)
        ]
        return params, list(parts)


def _pairs(layout: Layout, unsharded: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(part of a parameter, part of the rows) that hold the same elements."""
    return [
        (
            unsharded.as_strided(s.size, s.param_strides, slot.unsharded_offset + s.param_offset),
            rows.as_strided(s.size, s.rows_strides, s.rows_offset),
        )
        for slot in layout.slots
        for s in slot.segments
    ]


def _rows_from_params(layout: Layout, unsharded: Tensor) -> Tensor:
    """The rows again, from the parameters that were copied out of them."""
    rows = unsharded.new_zeros(layout.numel)
    for param, row in _pairs(layout, unsharded, rows):
        row.copy_(param)
    return rows
