"""GradBuffer: unsharded gradients on their way into one reduction.

Level 10 of the data flow: holds. Gradients go into the rows that a reduce-scatter will consume and are freed,
a large one as soon as autograd has it, small ones together when the unit's backward is over. Where ranks send
to one another in pairs, a large one needs no rows: it stays as autograd left it until its parts are with
their owners, or a copy does, where its dtype is another or its bytes are not its own. Without gradient sync
all of it simply stays, and the next micro-batch adds to it in the reduce dtype.

Flags travel along that say which parameters were used somewhere and which were not. Two a parameter, not one:
a sum of ones in bfloat16 stops at 256, but a positive sum stays positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from operator import attrgetter
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from shardkit._torch import ReduceScatter, owns_bytes, split_flat
from shardkit.collectives import Route, is_pairwise
from shardkit.grad_rows import GradRows, contiguous_grad
from shardkit.layout import BucketSpec, ReduceLayout, can_be_direct, reduce_layout
from shardkit.schedule import grads_to_sweep
from shardkit.sharded_param import ShardedParam

_wants_grad = attrgetter("requires_grad")


class Taken(NamedTuple):
    """A bucket's gradients, ready to be reduced."""

    rows: Tensor  # (num_ranks * layout.rows.row_numel,)
    direct: list[Tensor]  # gradients whose parts go straight to their owners, each contiguous
    used_all: bool  # every parameter had a gradient


class GradBuffer:
    """The gradients of one bucket, from the first one to the reduction."""

    def __init__(self, params: Sequence[ShardedParam], spec: BucketSpec, route: Route | None) -> None:
        self.params, self.spec = params, spec
        self.route = route  # of the reduction; over a group of its own, where the user asked
        self.comm: ReduceScatter | None = None  # the user's, which allocates the rows too
        self.partial: Tensor | None = None  # (row_numel,), reduced over the shard axis, not over the replicas
        self.trainable: tuple[int, ...] = ()  # indices of the parameters that are reduced
        self.layout: ReduceLayout | None = None
        itemsize = spec.compute_dtype.itemsize
        self.swept = grads_to_sweep([slot.numel * itemsize for slot in spec.layout.slots])
        large = [index for index in range(len(params)) if index not in self.swept]
        self._may_be_direct = frozenset([index for index in large if can_be_direct(spec.layout, index)])
        self._direct: frozenset[int] = frozenset()  # indices of the parameters that need no rows
        self._kept: dict[int, Tensor] = {}  # their gradients, contiguous
        self._grad_rows: GradRows | None = None  # of the others
        self._rows: Tensor | None = None  # while gradients are added
        self._used: set[int] = set()
        self._all_used = torch.empty(0)  # the flags that say so, and the padding before them
        self._received = _Received([], [])

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has been added since the last reduction."""
        return self._rows is None

    def add(self, grads: Mapping[int, Tensor]) -> None:
        """Take gradients (index of the parameter -> its unsharded gradient), or add them to earlier ones.

        Raises:
            RuntimeError: a parameter that had no gradient in earlier micro-batches has one now.
        """
        grad_rows = self._prepare()
        if not self._used.issuperset(grads) and not set(self.trainable).issuperset(grads):
            _refuse_new([self.params[index].name for index in sorted(set(grads) - set(self.trainable))])
        if self._direct:
            for index in self._direct.intersection(grads):
                self._keep(index, grads[index])
            in_rows = {index: grad for index, grad in grads.items() if index not in self._direct}
            grad_rows.write(in_rows, self._used)
        else:
            grad_rows.write(grads, self._used)
        self._used.update(grads)

    def sweep(self, make_room: Callable[[], None]) -> None:
        """Take every `.grad` of a gathered parameter, whoever put it there: pipelining sets them by hand.

        Args:
            make_room: called before there are rows, as those of another reduction may be under way.
        """
        grads: dict[int, Tensor] = {}
        for index, param in enumerate(self.params):
            unsharded = param.unsharded
            if unsharded is not None and (grad := unsharded.grad) is not None:
                unsharded.grad = None
                grads[index] = grad
        if not grads:
            return
        if self._rows is None:
            make_room()
            grad_rows, used = self._lay_out(), set(grads)
            if (joined := grad_rows.join(grads)) is not None:  # before there are rows
                self._rows, self._used = grad_rows.allocate(self.comm), used
                grad_rows.write_joined(joined)
                return
        self.add(grads)

    def take(self) -> Taken:
        """The gradients, with zeros for unused parameters, and flags; now it is empty."""
        grad_rows = self._prepare()
        rows, kept, used = self._rows, self._kept, self._used
        assert rows is not None
        self._rows, self._kept, self._used = None, {}, set()
        if used_all := len(used) == len(self.trainable):
            grad_rows.finish((), self._all_used)
        else:
            unused = [index for index in self.trainable if index not in used]
            flags = _flags(self.trainable, unused, grad_rows.tail_numel, self.spec)
            grad_rows.finish([index for index in unused if index not in self._direct], flags)
            for index in self._direct.intersection(unused):
                kept[index] = rows.new_zeros(self.spec.layout.slots[index].numel)
        direct = [kept[index] for index in sorted(self._direct)] if self._direct else []
        return Taken(rows, direct, used_all)

    def split_row(self, row: Tensor) -> tuple[list[Tensor], Tensor]:
        """This rank's part of every trainable parameter's gradient, and the flags: views of what it got."""
        views = split_flat(row, self._received.pieces)
        return [views[piece] for piece in self._received.piece_of], views[-1]

    def free(self) -> None:
        """Give up what was taken: the reduction has consumed it, or it lives on as gradients."""
        if self._rows is None and self._grad_rows is not None:
            self._grad_rows.free()

    def drop(self) -> None:
        """Forget what was not reduced: the iteration failed."""
        self._rows = self.partial = None
        self._kept, self._used = {}, set()
        self.free()

    def direct_of(self, trainable: Sequence[int]) -> frozenset[int]:
        """Which gradients need no rows: their parts are sent as they are, and nothing divides them before."""
        if self.partial is not None:
            return self._direct  # it was received as these are
        if not self._may_be_direct:
            return self._may_be_direct
        spec, route = self.spec, self.route
        if route is None or self.comm is not None or spec.layout.num_ranks == 1 or not is_pairwise(route):
            return frozenset()
        if spec.device.type != "cpu" or spec.reduce_dtype == torch.float16:
            return frozenset()
        return self._may_be_direct.intersection(trainable)

    def _prepare(self) -> GradRows:
        """The rows, allocated."""
        if self._rows is None or self._grad_rows is None:
            self._rows = self._lay_out().allocate(self.comm)
        assert self._grad_rows is not None
        return self._grad_rows

    def _lay_out(self) -> GradRows:
        """The rows for what trains now: what autograd goes by, once there is a gathered form."""
        forms = [param.unsharded if param.unsharded is not None else param.sharded for param in self.params]
        trainable = tuple(compress(range(len(forms)), map(_wants_grad, forms)))
        direct = self.direct_of(trainable)
        if self._grad_rows is not None and trainable == self.trainable and direct == self._direct:
            return self._grad_rows
        if self.partial is not None:
            _refuse_switch([self.params[index].name for index in sorted({*trainable} ^ {*self.trainable})])
        self.trainable, self._direct = trainable, direct
        self.layout = reduce_layout(self.spec.layout, trainable, direct)
        self._received = _pieces_received(self.layout)
        in_rows = {index: self.params[index] for index in trainable if index not in direct}
        self._grad_rows = GradRows(in_rows, self.layout.rows, self.spec)
        self._all_used = _flags(trainable, (), self._grad_rows.tail_numel, self.spec)
        return self._grad_rows

    def _keep(self, index: int, grad: Tensor) -> None:
        """Hold a gradient as it is, or add it to that of an earlier micro-batch."""
        local, dtype = contiguous_grad(self.params[index], grad), self.spec.reduce_dtype
        if index in self._used:
            self._kept[index].add_(local)
        elif local.dtype == dtype and owns_bytes(local):
            self._kept[index] = local.detach()  # create_graph: sums have no history
        else:  # others may write to these bytes, or we to theirs
            plain = torch.empty(local.shape, dtype=dtype, device=self.spec.device)
            self._kept[index] = plain.copy_(local)


def without_grad() -> AbstractContextManager[object]:
    """As torch.no_grad, and nothing where gradients are off: so they are in most backwards."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING = nullcontext()


def _flags(trainable: Sequence[int], unused: Sequence[int], numel: int, spec: BucketSpec) -> Tensor:
    """(numel,): ones for what was used, then ones for what was not, behind padding."""
    used = [float(index not in unused) for index in trainable]
    padding = [0.0] * (numel - 2 * len(used))
    flags = torch.tensor([*padding, *used, *(1.0 - flag for flag in used)], dtype=spec.reduce_dtype)
    return flags.to(spec.device, non_blocking=True)  # else the host would wait for the stream


def _refuse_new(names: Sequence[str]) -> NoReturn:
    """The gradients of earlier micro-batches have no place for another one's."""
    raise RuntimeError(
        f"param {names[0]!r}: requires_grad was switched on between micro-batches without gradient sync, "
        "whose buffer has no place for it. Switch it after a synced backward."
    )


def _refuse_switch(names: Sequence[str]) -> NoReturn:
    """Other parameters cannot be added to the partial sum of those that were trainable."""
    raise RuntimeError(
        f"param {names}: requires_grad was switched between micro-batches whose all-reduce is deferred, so "
        "their sums do not match. Switch it after a backward with set_requires_all_reduce(True)."
    )


class _Received(NamedTuple):
    """What a reduction receives, cut."""

    pieces: list[Tensor]  # meta tensors shaped as what follows one another
    piece_of: list[int]  # which of them is the gradient of each trainable parameter


def _pieces_received(layout: ReduceLayout) -> _Received:
    """The parameters' parts, the padding between them, and the flags, in order."""
    pieces: list[Tensor] = []
    piece_of = [0] * len(layout.places)
    end = 0
    for position in sorted(range(len(layout.places)), key=layout.places.__getitem__):
        offset, shape = layout.places[position]
        numel = math.prod(shape)
        start = offset if numel else end
        if start > end:
            pieces.append(torch.empty(start - end, device="meta"))
        piece_of[position] = len(pieces)
        pieces.append(torch.empty(shape, device="meta"))
        end = start + numel
    flags_offset = layout.row_numel - layout.tail_numel
    pieces.append(torch.empty(flags_offset - end, device="meta"))
    pieces.append(torch.empty(layout.tail_numel, device="meta"))
    return _Received(pieces, piece_of)
