"""Collectives over the rows of a buffer; every byte that a step of training sends passes here.

Level 5 of the data flow: moves. Takes flat tensors and a `Route`; gives a `Pending`, whose `wait` names the
unit and the ranks when a peer does not come. It counts what it sends (`count_traffic`).

Gloo's own collectives copy through staging buffers. Between CPUs every rank sends its row straight to where
it belongs instead, in pairs; each message bears the bucket's tag, so two units can never be mixed up:

    all_gather, 3 ranks       rank 0 -> 1, 2        rank 1 -> 2, 0        rank 2 -> 0, 1
    reduce_scatter            step s: rank r sends row r+s to its owner, receives its own row from r-s, adds
    it

    measured, 32 MB, 2 / 4 ranks on 2 cores: all-gather 7 / 15 ms (gloo's own 21 / 34), reduce-scatter 22 / 36
    (33-40 / 82-146)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit._torch import all_gather_single, backend_name, reduce_scatter_single
from shardkit.buffer import empty_flat
from shardkit.errors import CollectiveTimeoutError

Op = dist.ReduceOp.RedOpType

_TAG_BASE = 0x5AD0_0000  # far from the tags that programs use for their own messages on the same group


@dataclass(frozen=True, slots=True)
class Route:
    """Who takes part in a bucket's collectives, and how its messages are told from other buckets'."""

    group: dist.ProcessGroup
    backend: str
    tag: int  # of its gathers, and tag + 1 of its reductions: the same on all ranks of the group

    @property
    def can_average(self) -> bool:
        """Whether the group's reductions offer a mean; a fake one promises what NCCL does."""
        return self.backend in ("nccl", "fake")


@dataclass(slots=True)
class Traffic:
    """What this rank sent while it was counted: collectives and bytes, by kind."""

    num_calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)


class Pending:
    """A collective under way."""

    __slots__ = ("_kind", "_label", "_route", "_then", "_works")

    def __init__(
        self,
        works: list[dist.Work],
        kind: str,
        label: str,
        route: Route | None,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._works, self._kind, self._label, self._route, self._then = works, kind, label, route, then

    def wait(self) -> None:
        """Return when the result is there.

        Raises:
            CollectiveTimeoutError: a peer did not take part within the group's timeout, or died.
        """
        try:  # not `_naming_the_missing`, whose generator costs 2 % of a unit's host time
            for work in self._works:
                work.wait()
            if self._then is not None:
                self._then()
        except RuntimeError as error:
            raise _who_is_missing(self._kind, self._label, self._route, error) from error
        self._works, self._then = [], None


DONE = Pending([], "nothing", "", None)  # what is already in the stream's order, or has nobody to wait for

_active: list[Traffic] = []
_native = False


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count this rank's collectives and the bytes it sends inside the `with`."""
    traffic = Traffic()
    _active.append(traffic)
    try:
        yield traffic
    finally:
        _active.remove(traffic)


@contextmanager
def native_collectives() -> Iterator[None]:
    """Use c10d's own collectives on gloo too, for tools that count or trace those. All ranks must."""
    global _native
    before, _native = _native, True
    try:
        yield
    finally:
        _native = before


def all_gather(output: Tensor, row: Tensor, route: Route, label: str) -> Pending:
    """Gather one row a rank. Collective over `route.group`: all ranks must call.

    Args:
        output: (num_ranks * row_numel,), contiguous.
        row: (row_numel,), this rank's; it may be its own place in `output`.
        label: what is gathered, for errors.
    """
    if _active:
        _count("all_gather", (route.group.size() - 1) * row.nbytes)
    if is_pairwise(route):
        with _naming_the_missing("all_gather", label, route):
            works = _exchange_rows(output, row, route)
        return Pending(works, "all_gather", label, route)
    all_gather_single(output, row, route.group)
    return DONE


def reduce_scatter(
    output: Tensor, rows: Tensor, route: Route, label: str, op: Op = dist.ReduceOp.SUM
) -> Pending:
    """Reduce the ranks' buffers and keep this rank's row. Collective over `route.group`: all ranks must call.

    Args:
        output: (row_numel,).
        rows: (num_ranks * row_numel,), contiguous; lost.
        op: the sum, or the mean where the route can average, or `is_pairwise`.
    """
    if _active:
        _count("reduce_scatter", (route.group.size() - 1) * output.nbytes)
    if is_pairwise(route):
        of_ranks = rows.view(route.group.size(), -1)
        return _pairwise_reduce_scatter([output], [[row] for row in of_ranks], route, label, op)
    reduce_scatter_single(output, rows, op, route.group)
    return DONE


def is_pairwise(route: Route) -> bool:
    """Whether ranks send to one another in pairs. Then a reduce-scatter takes parts, and offers a mean."""
    return route.backend == "gloo" and not _native


def reduce_scatter_parts(
    outputs: Sequence[Tensor],
    sends: Sequence[Sequence[Tensor]],
    route: Route,
    label: str,
    op: Op = dist.ReduceOp.SUM,
) -> Pending:
    """`reduce_scatter` of rows that lie in parts; every part is a message, and none is written to.

    Collective over `route.group`: all ranks must call, where it `is_pairwise`.

    Args:
        outputs: contiguous 1-D tensors that this rank's row becomes, in order.
        sends: by group rank, contiguous 1-D tensors of as many elements as its outputs; its own included.
        op: the sum, or the mean.
    """
    if _active:
        others = [parts for rank, parts in enumerate(sends) if rank != route.group.rank()]
        _count("reduce_scatter", sum(part.nbytes for parts in others for part in parts))
    return _pairwise_reduce_scatter(outputs, sends, route, label, op)


def all_reduce(tensor: Tensor, route: Route, label: str, op: Op = dist.ReduceOp.SUM) -> Pending:
    """Reduce `tensor` over the ranks, in place. Collective over `route.group`: all ranks must call."""
    if _active:
        size = route.group.size()
        _count("all_reduce", 2 * (size - 1) * tensor.nbytes // size)
    is_async = tensor.device.type == "cpu"
    work = dist.all_reduce(tensor, op, group=route.group, async_op=is_async)
    return Pending([work] if is_async and work is not None else [], "all_reduce", label, route)


def all_reduce_now(tensor: Tensor, group: dist.ProcessGroup, label: str, op: Op = dist.ReduceOp.SUM) -> None:
    """`all_reduce`, waited for, of what is in no bucket. Collective over `group`: all ranks must call."""
    all_reduce(tensor, Route(group, backend_name(group, tensor.device), 0), label, op).wait()


def broadcast(tensor: Tensor, route: Route, label: str) -> Pending:
    """Send the first rank's `tensor` to all, in place. Collective over `route.group`: all ranks must call."""
    _count("broadcast", (route.group.size() - 1) * tensor.nbytes if route.group.rank() == 0 else 0)
    work = dist.broadcast(tensor, group=route.group, group_src=0, async_op=True)
    return Pending([] if work is None else [work], "broadcast", label, route)


def all_to_all(
    receives: Mapping[int, Tensor],
    sends: Mapping[int, Tensor],
    route: Route,
    label: str,
    *,
    back: bool = False,
) -> Pending:
    """Send one tensor to each of some peers and receive one from each of some, straight into place.

    Collective over those who send or receive: a peer to whom this rank sends must receive as many bytes from
    it. Between two ranks, calls of one route and direction are matched in order.

    Args:
        receives: contiguous tensors by group rank, none of it this rank's own.
        sends: the same; they must not change before `wait` returns.
        back: True for the answers, which have a tag of their own.

    Raises:
        CollectiveTimeoutError: a peer has died.
    """
    group, tag = route.group, route.tag + back
    if _active:
        _count("all_to_all", sum(tensor.nbytes for tensor in sends.values()))
    if route.backend == "gloo":
        with _naming_the_missing("all_to_all", label, route):
            works = [group.recv([tensor], peer, tag) for peer, tensor in receives.items()]
            works += [group.send([tensor], peer, tag) for peer, tensor in sends.items()]
        return Pending(works, "all_to_all", label, route)
    ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in receives.items()]
    ops += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in sends.items()]
    return Pending(dist.batch_isend_irecv(ops) if ops else [], "all_to_all", label, route)


def num_scratch_rows(route: Route) -> int:
    """Rows that a reduce-scatter over `route` allocates beside its output, for as long as it is under way."""
    return 1 if is_pairwise(route) and route.group.size() > 2 else 0


def has_peers(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the other ranks exist: those of a fake group, which plans and benchmarks use, do not."""
    return backend_name(group, device) != "fake"


_num_routes: Counter[str] = Counter()


def new_route(group: dist.ProcessGroup, device: torch.device) -> Route:
    """A route of its own for one bucket. Peers make a group's routes in the same order, so tags agree."""
    ordinal = _num_routes[group.group_name]
    _num_routes[group.group_name] += 1
    return Route(group, backend_name(group, device), _TAG_BASE + 2 * (ordinal % 0x1_0000))


def _count(kind: str, sent_bytes: int) -> None:
    for traffic in _active:
        traffic.num_calls[kind] += 1
        traffic.sent_bytes[kind] += sent_bytes


def _exchange_rows(output: Tensor, row: Tensor, route: Route) -> list[dist.Work]:
    """Send `row` to every peer, receive theirs where they belong, and put our own beside them."""
    group, tag = route.group, route.tag
    rank, size, numel = group.rank(), group.size(), row.numel()
    if numel == 0:
        return []
    works = []
    for step in range(1, size):
        peer = (rank - step) % size
        works.append(group.recv([output.narrow(0, peer * numel, numel)], peer, tag))
    works.extend(group.send([row], (rank + step) % size, tag) for step in range(1, size))
    own = output.narrow(0, rank * numel, numel)
    if own.data_ptr() != row.data_ptr():
        own.copy_(row)
    return works


def _pairwise_reduce_scatter(
    outputs: Sequence[Tensor], sends: Sequence[Sequence[Tensor]], route: Route, label: str, op: Op
) -> Pending:
    """Send every part to its owner at once; receive two rows at a time, at first, then a part for a part.

    step        1         2                          3                      4
    into        outputs   scratch                    scratch, each part when that of step 2 has been added
    then adds             own parts, then scratch    scratch                ..
    """
    group, tag = route.group, route.tag + 1  # a gather of the same bucket may be under way
    rank, size = group.rank(), group.size()
    pairs = [(output, own) for output, own in zip(outputs, sends[rank], strict=True) if output.numel()]
    scratch: Sequence[Tensor] = ()
    if pairs and num_scratch_rows(route):
        first, numels = pairs[0][0], [output.numel() for output, _ in pairs]
        scratch = empty_flat(sum(numels), first.dtype, first.device).split(numels)
    divisor = size if op == dist.ReduceOp.AVG else 1

    def receive(step: int, index: int) -> dist.Work:
        place = pairs[index][0] if step == 1 else scratch[index]
        return group.recv([place], (rank - step) % size, tag)

    indices = range(len(pairs))
    with _naming_the_missing("reduce_scatter", label, route):
        receives = {(step, i): receive(step, i) for step in range(1, min(3, size)) for i in indices}
        peers = [(rank + step) % size for step in range(1, size)]
        sent = [group.send([part], peer, tag) for peer in peers for part in sends[peer] if part.numel()]

    def add_as_they_come() -> None:
        for step in range(min(2, size - 1), size):
            for i, (output, own) in enumerate(pairs):
                if step <= 2:
                    receives.pop((1, i)).wait()
                if step >= 2:
                    receives.pop((step, i)).wait()
                addends = [own] if step == 1 else [own, scratch[i]] if step == 2 else [scratch[i]]
                _add(output, addends, divisor if step == size - 1 else 1)
                if step < size - 1:
                    receives[step + 1, i] = receive(step + 1, i)
        for send in sent:
            send.wait()

    return Pending([], "reduce_scatter", label, route, add_as_they_come)


_BLOCK_NUMEL = 1 << 16  # a block of the sum and one of an addend lie in the cache together


def _add(total: Tensor, addends: Sequence[Tensor], divisor: int) -> None:
    """Add one after another, then divide, block by block: memory is read and written once, not for each."""
    blocks = zip(*(tensor.split(_BLOCK_NUMEL) for tensor in (total, *addends)), strict=True)
    for block, *others in blocks:
        for other in others:
            block.add_(other)
        if divisor != 1:
            block.div_(divisor)


@contextmanager
def _naming_the_missing(kind: str, label: str, route: Route | None) -> Iterator[None]:
    """Name the collective in what gloo says of a peer that died before messages were posted."""
    try:
        yield
    except RuntimeError as error:
        raise _who_is_missing(kind, label, route, error) from error


def _who_is_missing(
    kind: str, label: str, route: Route | None, error: RuntimeError
) -> CollectiveTimeoutError:
    ranks = [] if route is None else dist.get_process_group_ranks(route.group)
    return CollectiveTimeoutError(
        f"{label}: {kind} over ranks {ranks} failed on rank {dist.get_rank()}: {error} A peer died, or "
        "did not come: it raised an error of its own (look for the first one), skipped this unit, or ran "
        "units in another order. Let every rank run the same units in the same order; ranks whose loss used "
        "other units of them need set_reduce_scatter_unused_params(True)."
    )
