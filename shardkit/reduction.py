"""Reduction: one bucket's gradients on the wire, and what becomes of them.

Level 11 of the data flow: moves. Takes what a `GradBuffer` holds; gives `.grad` on the sharded parameters.

    rows --divide--> reduce_scatter --> row --all_reduce over replicas--> divide --> flags --cast--> .grad
                     (parts of large gradients are sent from where these lie, where messages go in pairs)

On CUDA all of it is put on streams at once and the rows are held until it has passed; on the CPU the second
half runs when the reduction is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import (
    grad_hooks_of,
    has_grad_hooks,
    local_of,
    new_dtensor,
    run_grad_hooks,
    run_post_accumulate_hooks,
    without_torch_function,
)
from shardkit.bucket import Bucket
from shardkit.buffer import empty_flat
from shardkit.collectives import Pending, all_reduce, is_pairwise, reduce_scatter, reduce_scatter_parts
from shardkit.errors import UnevenUseError
from shardkit.grads import Taken, without_grad
from shardkit.layout import ReduceLayout
from shardkit.precision import Division, division
from shardkit.sharded_param import ShardedParam
from shardkit.streams import Streams


@dataclass(slots=True)
class ReduceOptions:
    """What the user asked of a unit's gradient reduction."""

    divide_factor: float | None = None
    sum_only: bool = False
    fill_unused: bool = False  # zero gradients for what this rank did not use
    all_reduce: bool = True  # over the replicas; False keeps a partial sum
    hook: Callable[[Tensor], None] | None = None  # on the reduced row, before it is divided
    hook_stream: torch.Stream | None = None


class Reduction:
    """One reduction under way. Collective over the shard axis, then over the replicas, if there are any."""

    def __init__(self, bucket: Bucket, options: ReduceOptions, streams: Streams) -> None:
        self.bucket, self.streams = bucket, streams
        self._options, self._replicas = options, bucket.replicate_route
        grads = bucket.grads
        with without_grad():
            taken = grads.take()
        assert grads.layout is not None
        self._taken: Taken | None = taken
        self._used_all = taken.used_all
        self._layout: ReduceLayout = grads.layout
        self._trainable = grads.trainable
        self._division = _choose_division(bucket, options)
        self._op = dist.ReduceOp.AVG if self._division.average else dist.ReduceOp.SUM
        self._event: torch.Event | None = None
        self._flags: tuple[torch.Event | None, Tensor] | None = None
        with streams.after(streams.reduce_scatter):
            if self._division.before != 1:
                taken.rows.div_(self._division.before)
            self._row: Tensor | None
            self._row, self._pending = self._reduce_scatter(taken)
            if streams.runs_ahead:
                self._collect()

    def finish(self) -> None:
        """Return when the gradients are there for the current stream, and let go of the rows."""
        if self._taken is None:
            return
        if self.streams.runs_ahead:
            self.streams.wait(self._event)
        else:
            self._collect()
        self._taken = self._row = self._pending = None
        self.bucket.grads.free()

    def drop(self) -> None:
        """Wait for what is on the wire, and forget it: the backward that it came from has failed."""
        if self._taken is not None and self._pending is not None:
            self._pending.wait()
        self.streams.wait(self._event)  # it may still read the rows, and write what is in `.grad` already
        self._taken = self._pending = None
        self.bucket.grads.free()

    def wait_on_host(self) -> None:
        """Block until offloaded gradients have arrived: the CPU reads them without knowing of streams."""
        if self._event is not None and self.bucket.spec.shard_device != self.bucket.spec.device:
            self._event.synchronize()

    def check_use(self) -> None:
        """Raise what `finish` could not without waiting for the device. Local."""
        if self._flags is not None:
            event, flags = self._flags
            self._flags = None
            if event is not None:
                event.synchronize()
            self._check_flags(flags.tolist())

    def _reduce_scatter(self, taken: Taken) -> tuple[Tensor, Pending | None]:
        layout, grads, rows = self._layout, self.bucket.grads, taken.rows
        route, comm = grads.route, grads.comm
        if route is None or layout.rows.num_ranks == 1:
            return rows, None
        if layout.direct:  # so it was when the first gradient came, whatever collective was set since
            row = empty_flat(layout.row_numel, rows.dtype, rows.device)
            outputs, sends = _parts(layout, row, taken)
            _zero_padding(layout, row)
            return row, reduce_scatter_parts(outputs, sends, route, self.bucket.label, self._op)
        if comm is not None:
            row = comm.allocate((layout.row_numel,), dtype=rows.dtype, device=rows.device)
            comm(output_tensor=row, input_tensor=rows, group=route.group, op=self._op, async_op=False)
            return row, None
        row = empty_flat(layout.row_numel, rows.dtype, rows.device)
        return row, reduce_scatter(row, rows, route, self.bucket.label, self._op)

    def _collect(self) -> None:
        """Everything after the reduce-scatter."""
        if self._pending is not None:
            self._pending.wait()
        grads, streams, row = self.bucket.grads, self.streams, self._row
        assert row is not None
        if grads.partial is not None:
            self._add_partial(row, grads.partial)
            grads.partial = None
        if self._replicas is not None and not self._options.all_reduce:
            grads.partial = row
            self._event = streams.mark()
            return
        stream = streams.reduce_scatter if self._replicas is None else streams.all_reduce
        if self._options.hook is not None:
            stream = self._options.hook_stream or streams.all_reduce
        with streams.after(stream):
            if self._replicas is not None and self.bucket.spec.axes.replicate_size > 1:
                all_reduce(row, self._replicas, self.bucket.label, self._op).wait()
            if self._options.hook is not None:
                self._options.hook(row[: self._layout.row_numel - self._layout.tail_numel])
            if self._division.after != 1:
                row.div_(self._division.after)
            parts, flags = grads.split_row(row)
            used = self._read_flags(flags)
            if row.dtype != self.bucket.spec.dtype:
                parts, _ = grads.split_row(row.to(self.bucket.spec.dtype))
            self._assign(parts, used)
            self._event = streams.mark()

    def _add_partial(self, row: Tensor, partial: Tensor) -> None:
        """Add what earlier micro-batches left; unused is only what none of them, and not this one, used."""
        unused = slice(self._layout.row_numel - self._layout.tail_numel + len(self._trainable), None)
        still_unused = torch.minimum(row[unused], partial[unused])
        row.add_(partial)[unused] = still_unused

    def _read_flags(self, flags: Tensor) -> list[bool]:
        """Which of the trainable parameters were used somewhere.

        Reading them waits for the device, so where this rank used all of them anyway it is put off.
        """
        num = len(self._trainable)
        if self._options.fill_unused:
            return [True] * num
        flags = flags.real if flags.is_complex() else flags
        if self.streams.runs_ahead and self._used_all:
            flags = flags.to("cpu", non_blocking=True)
            self._flags = (self.streams.mark(), flags)
            return [True] * num
        values = flags.tolist()
        if not any(values[num:]):  # nobody left one out
            return [True] * num
        self._check_flags(values)
        return [value > 0 for value in values[:num]]

    def _check_flags(self, flags: list[float]) -> None:
        num = len(self._trainable)
        uneven = [
            self.bucket.params[index].name
            for position, index in enumerate(self._trainable)
            if flags[position] > 0 and flags[num + position] > 0
        ]
        if uneven:
            raise UnevenUseError(
                f"{self.bucket.label}: some ranks used and others did not use {uneven} in this backward, so "
                "their gradients differ in meaning. Call set_reduce_scatter_unused_params(True) to count "
                "unused ones as zero, or use the same parameters on every rank."
            )

    def _assign(self, parts: list[Tensor], used: list[bool]) -> None:
        """Views of the row become, or are added to, the gradients of the sharded parameters."""
        offloads = self.bucket.spec.shard_device != self.bucket.spec.device
        params = [self.bucket.params[index] for index in self._trainable]
        with without_torch_function():
            is_hooked = list(map(any, map(grad_hooks_of, [param.sharded for param in params])))
        hooked = []
        # a hook has to find torch as the user left it
        with nullcontext() if any(is_hooked) else without_torch_function():
            for param, local, is_used, runs_hooks in zip(params, parts, used, is_hooked, strict=True):
                if not is_used:
                    continue
                sharded = param.sharded
                sharding, local = param.sharding, self._offload(param, local) if offloads else local
                grad = new_dtensor(sharding.kind, local, sharding.sharded, requires_grad=False)
                if runs_hooks:
                    grad = run_grad_hooks(sharded, grad)
                    hooked.append(param)
                if sharded.grad is None:
                    sharded.grad = grad
                else:
                    _accumulate(param, grad)
        for param in hooked:
            run_post_accumulate_hooks(param.sharded)

    def _offload(self, param: ShardedParam, local: Tensor) -> Tensor:
        spec = self.bucket.spec
        read_at_once = param.sharded.grad is not None or has_grad_hooks(param.sharded)
        return local.to(spec.shard_device, non_blocking=spec.pin_memory and not read_at_once)


def _parts(layout: ReduceLayout, row: Tensor, taken: Taken) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Part by part: what this rank receives, as pieces of `row`, and what each rank is sent."""
    numels = [parts.numels for parts in layout.direct.values()]
    offsets = [layout.places[position].offset for position in layout.direct]
    outputs = [row.narrow(0, at, of[layout.rows.rank]) for at, of in zip(offsets, numels, strict=True)]
    outputs.append(row[layout.row_offset :])
    direct = [grad.view(-1).split(of) for grad, of in zip(taken.direct, numels, strict=True)]
    rows = taken.rows.view(layout.rows.num_ranks, -1).unbind()
    return outputs, [list(parts) for parts in zip(*direct, rows, strict=True)]


def _zero_padding(layout: ReduceLayout, row: Tensor) -> None:
    """Between parts, where nothing is received: the user's hook sees the whole row."""
    starts = [layout.places[position].offset for position in layout.direct]
    numels = [parts.numels[layout.rows.rank] for parts in layout.direct.values()]
    for start, numel, end in zip(starts, numels, [*starts[1:], layout.row_offset], strict=True):
        if start + numel < end:
            row[start + numel : end].zero_()


def _choose_division(bucket: Bucket, options: ReduceOptions) -> Division:
    grads, replicas = bucket.grads, bucket.replicate_route
    can_average = grads.route is None or grads.route.can_average
    if replicas is not None:
        can_average = can_average and replicas.can_average
    elif grads.route is not None and not can_average and grads.comm is None and options.hook is None:
        can_average = is_pairwise(grads.route)  # nothing comes between this sum and the division
    can_average = can_average and not options.sum_only
    return division(bucket.spec.reduce_dtype, bucket.spec.axes.size, options.divide_factor, can_average)


def _accumulate(param: ShardedParam, grad: DTensor) -> None:
    held = param.sharded.grad
    if not isinstance(held, DTensor):
        raise TypeError(
            f"param {param.name!r}: expected its .grad to be a DTensor as the parameter is, got "
            f"{type(held).__name__}. Set it to None, or keep what backward put there."
        )
    with torch.no_grad():
        local_of(held).add_(local_of(grad))


_bucket_of = attrgetter("bucket")


class ReductionQueue:
    """The reductions of a tree that are in flight, oldest first."""

    def __init__(self) -> None:
        self.limit = 1  # how many may be in flight
        self._in_flight: deque[Reduction] = deque()
        self._unchecked: list[Reduction] = []

    def add(self, reduction: Callable[[], Reduction]) -> None:
        """Start a reduction once fewer than `limit` are in flight."""
        self.make_room()
        self._in_flight.append(reduction())

    @property
    def is_full(self) -> bool:
        """Whether as many are in flight as may be."""
        return len(self._in_flight) >= self.limit

    def make_room(self) -> None:
        """Finish the oldest until another one may start."""
        while len(self._in_flight) >= self.limit:
            self._finish_oldest()

    def finish_of(self, bucket: Bucket) -> None:
        """Finish what is in flight of `bucket`, so that its gradients can gather anew."""
        while bucket in map(_bucket_of, self._in_flight):
            self._finish_oldest()

    def finish_all(self) -> None:
        """Return when all gradients are there."""
        while self._in_flight:
            self._finish_oldest()
        for reduction in self._unchecked:
            reduction.wait_on_host()

    def drop_all(self) -> None:
        """Forget what is in flight: nobody may find gradients of a failed backward in `.grad` later on."""
        while self._in_flight:
            self._in_flight.popleft().drop()
        self._unchecked = []

    def check_use(self) -> None:
        """Raise what finished reductions found only on the device."""
        unchecked, self._unchecked = self._unchecked, []
        for reduction in unchecked:
            reduction.check_use()

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        reduction.finish()
        self._unchecked.append(reduction)
