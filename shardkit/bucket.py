"""Bucket: the parameters of a unit that travel in one collective, and how they are gathered and resharded.

Level 8 of the data flow. It has a fixed set of buffers and at most one pending gather; where it stands is
read from them. *When* to gather is decided elsewhere (`schedule.py`, `hooks.py`).

    shard (at rest)  --cast, copy-->  own row  --all_gather-->  rows  --copy out-->  unsharded parameters
                     (only if they differ)            (in place for ragged layouts: rows and parameters are
                     one)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit._torch import AllGather
from shardkit.buffer import FlatBuffer
from shardkit.collectives import Pending, Route, all_gather
from shardkit.errors import GatheredParamError
from shardkit.grads import GradBuffer
from shardkit.layout import BucketSpec
from shardkit.sharded_param import ShardedParam
from shardkit.streams import Streams


class Bucket:
    """Gathers and reshards the parameters of one collective; its `grads` reduce their gradients."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        spec: BucketSpec,
        route: Route | None,
        replicate_route: Route | None,
    ) -> None:
        self.params, self.spec, self.route = tuple(params), spec, route
        self.replicate_route = replicate_route
        self.small_group: dist.ProcessGroup | None = (
            None  # of reshard_after_forward=n: gathers the kept pieces
        )
        self.all_gather_comm: AllGather | None = None  # the user's, which allocates the rows too
        self.reduce_route = route  # a group of its own, where the user asked
        self.label = ""
        self.changes = 0  # how often the shards changed, as far as we are told
        self.shard = FlatBuffer(spec.layout.row_numel, spec.dtype, spec.shard_device, pin=spec.pin_memory)
        if not self.shard.flat.is_meta:
            self.shard.flat.zero_()  # padding travels; let it be the same everywhere
        self.unsharded: FlatBuffer | None = None
        self.grads = GradBuffer(self.params, spec)
        self._rows: Tensor | None = None  # gathered, not yet copied out
        self._pending: Pending | None = None
        self._ready: torch.Event | None = None
        self._piece: Tensor | None = None  # kept of the rows after forward, for a gather over fewer ranks
        self._split_outputs: list[Tensor] = []
        self._gathered: list[nn.Parameter] = []  # the gathered form of every parameter, once it is made
        self._versions: list[int] = []  # of those, when they were registered
        self._wants_grad: list[bool] = []
        self._seen = (-1, -1)
        for param, slot in zip(self.params, spec.layout.slots, strict=True):
            param.place_in(self.shard, slot)

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules hold the gathered parameters."""
        first = self.params[0]
        return first.unsharded is not None and first.registered is first.unsharded

    @property
    def can_hold_params(self) -> bool:
        """Whether the parameters' present tensors have the dtype and device of the shard buffer."""
        flat = self.shard.flat
        return all(p.local.dtype == flat.dtype and p.local.device == flat.device for p in self.params)

    @property
    def is_trainable(self) -> bool:
        """Whether a parameter of it requires a gradient."""
        return any(param.sharded.requires_grad for param in self.params)

    @property
    def is_gathering(self) -> bool:
        """Whether a gather has been started and not been waited for."""
        return self._pending is not None

    @property
    def is_stale(self) -> bool:
        """Whether the shards changed since they were gathered."""
        return self._seen != self._fingerprint_of_values()

    def start_unshard(self, streams: Streams) -> None:
        """Start to gather. Collective over the shard axis (over `small_group` after `reshard_to`)."""
        if self._pending is not None or (self.is_unsharded and not self.is_stale):
            return
        streams.reclaim(keep=1 if self.unsharded is None or not streams.is_retired(self.unsharded) else 0)
        with torch.no_grad(), streams.on(streams.all_gather):
            self._pending = self._gather()
            if streams.runs_ahead:
                self._complete()
                self._ready = streams.mark()

    def finish_unshard(
        self, streams: Streams, hook_for: Callable[[Bucket, int], Callable[[Tensor], None]]
    ) -> None:
        """Wait for the gather and register the gathered parameters."""
        if self._pending is None:
            return
        if streams.runs_ahead:
            streams.wait(self._ready)
        else:
            with torch.no_grad():
                self._complete()
        self._pending = self._ready = self._piece = None
        seen = self._fingerprint_of_values()
        if self._seen != seen:  # an older graph that saved the old values must not compute with the new ones
            torch.autograd.graph.increment_version(self._gathered)
            self._seen = seen
        wants_grad = [param.sharded.requires_grad for param in self.params]
        if self._wants_grad != wants_grad:
            self._wants_grad = wants_grad
            for index, param in enumerate(self.params):
                param.follow_requires_grad(partial(hook_for, self, index))
        self._versions = [tensor._version for tensor in self._gathered]
        for param, tensor in zip(self.params, self._gathered, strict=True):
            param.register(tensor)

    def reshard(self, streams: Streams) -> None:
        """Register the sharded parameters and free the gathered ones; nothing where that is so already."""
        self.drop_gather()
        self._piece = None
        if not self.is_unsharded:
            return
        for param in self.params:
            param.register(param.sharded)
        assert self.unsharded is not None
        streams.free_later(self.unsharded)
        self._check_not_written()

    def reshard_to(self, streams: Streams, num_ranks: int) -> None:
        """Reshard, but keep this rank's piece of the rows of `num_ranks` neighbours, to gather over those
        only.
        """
        if not self.is_unsharded or self.unsharded is None:
            return
        layout = self.spec.layout
        piece_numel = layout.numel // num_ranks
        start = layout.rank % num_ranks * piece_numel
        with torch.no_grad():
            rows = self.unsharded.flat if layout.in_place else self._rows_from_params()
            piece = rows.view(-1)[start : start + piece_numel].clone()
        self.reshard(streams)
        self._piece = piece

    def drop_gather(self) -> None:
        """Wait for a gather that nobody needs any more: its messages are under way on every rank."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = self._rows = self._ready = None
        if self.unsharded is not None and not self.is_unsharded:
            self.unsharded.free()

    def take_in(self, replaced: Sequence[ShardedParam]) -> None:
        """Move parameters that the user replaced back into the shard buffer."""
        for param, slot in zip(self.params, self.spec.layout.slots, strict=True):
            if param in replaced:
                unsharded = param.unsharded
                param.place_in(self.shard, slot)
                param.unsharded = unsharded
        self.mark_changed()

    def communicate_like(self, other: Bucket) -> None:
        """Take over what the user chose for the collectives of a bucket that this one replaces."""
        self.small_group, self.all_gather_comm = other.small_group, other.all_gather_comm
        self.grads.comm, self.reduce_route = other.grads.comm, other.reduce_route

    def describe(self) -> list[str]:
        """What must agree on all ranks of the group, a line a parameter."""
        spec = self.spec
        return [f"{line}, {spec.dtype} computed in {spec.compute_dtype}" for line in spec.layout.describe()]

    def checksum(self) -> int:
        """A number that differs where the shard's bytes do, almost surely. Waits for the device."""
        flat = self.shard.flat.view(torch.uint8)
        words = flat[: flat.numel() // 4 * 4].view(torch.int32).to(torch.int64)
        return int((words * torch.arange(1, words.numel() + 1, device=words.device)).sum())

    def mark_changed(self) -> None:
        """The shards were written to by something that leaves no other trace, as a fused optimizer."""
        self.changes += 1

    def _check_not_written(self) -> None:
        """Refuse to throw away what the user wrote to a gathered parameter."""
        versions = [tensor._version for tensor in self._gathered]
        if versions == self._versions:
            return
        pairs = zip(self.params, versions, self._versions, strict=True)
        names = [param.name for param, now, before in pairs if now != before]
        self._versions = versions
        raise GatheredParamError(
            f"param {names[0]!r}: it was changed in place while gathered ({names}), and the change would be "
            "lost now that it is resharded. Call reshard() on its module first, then change the shards."
        )

    def _fingerprint_of_values(self) -> tuple[int, int]:
        """What changes when the shards are written to: version counters, and what leaves no trace there."""
        versions = [param.sharded._version + param.local._version for param in self.params]
        return self.changes, sum(versions)

    def _gather(self) -> Pending:
        rows = self._allocate_rows()
        self._rows = rows
        layout, route = self.spec.layout, self.route
        if self._piece is not None and self.small_group is not None and route is not None:
            return all_gather(rows, self._piece, replace(route, group=self.small_group), self.label)
        own = rows[layout.rank * layout.row_numel :][: layout.row_numel]
        if route is None or layout.num_ranks == 1:
            own.copy_(self.shard.flat, non_blocking=True)
            return Pending([], "all_gather", self.label, None)
        row = self.shard.flat
        if row.dtype != rows.dtype or row.device != rows.device:
            row = own.copy_(row, non_blocking=True)
        if self.all_gather_comm is not None:
            self.all_gather_comm(output_tensor=rows, input_tensor=row, group=route.group, async_op=False)
            return Pending([], "all_gather", self.label, route)
        return all_gather(rows, row, route, self.label)

    def _allocate_rows(self) -> Tensor:
        """The buffer to gather into: the parameters' own bytes where the layout and the transport allow."""
        spec = self.spec
        if self.all_gather_comm is not None:
            size = (spec.layout.numel,)
            return self.all_gather_comm.allocate(size, dtype=spec.compute_dtype, device=spec.device)
        if spec.layout.in_place:
            return self._allocate_unsharded().flat
        return torch.empty(spec.layout.numel, dtype=spec.compute_dtype, device=spec.device)

    def _allocate_unsharded(self) -> FlatBuffer:
        layout, spec = self.spec.layout, self.spec
        if self.unsharded is not None:
            self.unsharded.allocate()
            return self.unsharded
        numel = layout.numel if layout.in_place else layout.unsharded_numel
        self.unsharded = FlatBuffer(numel, spec.compute_dtype, spec.device)
        slots = zip(self.params, layout.slots, strict=True)
        self._gathered = [param.make_unsharded(self.unsharded, slot) for param, slot in slots]
        self._split_outputs = self._make_split_outputs(self.unsharded)
        return self.unsharded

    def _complete(self) -> None:
        """Wait for the rows and copy the parameters out of them."""
        assert self._pending is not None and self._rows is not None
        self._pending.wait()
        rows, self._rows = self._rows, None
        unsharded = self._allocate_unsharded()
        if rows is unsharded.flat:
            return
        layout = self.spec.layout
        if layout.in_place:
            unsharded.flat.copy_(rows)
        elif layout.columns:
            sizes = [numel for numel, _ in layout.columns]
            torch.split_with_sizes_copy(
                rows.view(layout.num_ranks, -1), sizes, dim=1, out=self._split_outputs
            )
        else:
            for param, row in self._pairs(unsharded.flat, rows):
                param.copy_(row)

    def _make_split_outputs(self, unsharded: FlatBuffer) -> list[Tensor]:
        """One tensor (num_ranks, numel) a column of the rows: a parameter with its padding, or a gap's
        scratch.
        """
        layout, flat = self.spec.layout, unsharded.flat
        if layout.in_place:
            return []
        with torch.inference_mode(False):
            return [
                torch.empty(layout.num_ranks, numel, dtype=flat.dtype, device=flat.device)
                if index < 0
                else unsharded.tensor(layout.slots[index].unsharded_offset, (layout.num_ranks, numel))
                for numel, index in layout.columns
            ]

    def _pairs(self, unsharded: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(part of a parameter, part of the rows) that hold the same elements."""
        return [
            (
                unsharded.as_strided(s.size, s.param_strides, slot.unsharded_offset + s.param_offset),
                rows.as_strided(s.size, s.rows_strides, s.rows_offset),
            )
            for slot in self.spec.layout.slots
            for s in slot.segments
        ]

    def _rows_from_params(self) -> Tensor:
        """The rows again, from the parameters that were copied out of them."""
        assert self.unsharded is not None
        rows = torch.zeros(self.spec.layout.numel, dtype=self.spec.compute_dtype, device=self.spec.device)
        for param, row in self._pairs(self.unsharded.flat, rows):
            row.copy_(param)
        return rows
