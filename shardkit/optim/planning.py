"""Who works on which piece, decided once for the whole step; and what travels for that.

Pure: pieces and a number of ranks in, a `StepPlan` out, equal on every rank. It prints itself, and its lines
are what ranks compare before the first message. Modes of a piece:

    local       it lies on one rank, which works on it                              nothing travels
    owner       its parts travel to one rank and the results back                   2 x what the owner lacks
    replicate   its parts travel to all its holders, which all work on it           tiny matrices alone

A piece with state of its own has its owner before any plan (`blocks.py`). Other owners are chosen over all
pieces of the step together, the costliest first: the rank that holds most of the piece while its load stays
within 1.1 of the best possible, else another holder, else the least loaded rank.
One such rule keeps 4-layer units of Llama-3-8B on 64 ranks within 1.1 of the ideal, where layer by layer the
busiest rank would have 17 times the mean.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Literal, NamedTuple

from shardkit.boxes import Box
from shardkit.layout import digest
from shardkit.optim.pieces import Piece, Share

Mode = Literal["local", "owner", "replicate"]
Placing = Literal["auto", "local", "owner", "replicate"]
SLACK = 1.1  # how far above the best possible load a rank may go to keep what it holds
TINY_BYTES = 16 << 10  # a piece whose copies are smaller is worked on by all its holders: one way, not two


class Transfer(NamedTuple):
    """Part of one field of a piece, from rank index to rank index.

    `boxes` are views of the local tensor of the rank that holds them: the source on the way to a worker, the
    target on the way back.
    """

    source: int
    target: int
    field: int
    boxes: tuple[Box, ...]
    nbytes: int


class Traffic(NamedTuple):
    """Bytes by rank index that a piece makes ranks send and receive, one way and back."""

    gather_sent: Mapping[int, int]
    gather_received: Mapping[int, int]
    return_sent: Mapping[int, int]
    return_received: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who works on a piece, of so many ranks.

    What travels follows from it: to the workers what they lack, of copies from those in their replica, and
    back to all other holders. It is worked out when it is asked for, as a rank is seldom concerned: the
    transfers of a large model over 1,024 ranks would be millions.
    """

    piece: Piece
    mode: Mode
    workers: tuple[int, ...]
    num_ranks: int

    @property
    def gathers(self) -> Iterator[Transfer]:
        """To the workers."""
        for number, field in enumerate(self.piece.fields):
            for copies in field.shares.copies:
                holders = [share.holder for share in copies]
                nbytes = copies[0].numel * field.dtype.itemsize
                for worker in self.workers:
                    if worker not in holders:
                        share = self._nearest(copies, worker)
                        yield Transfer(share.holder, worker, number, share.boxes, nbytes)

    @property
    def returns(self) -> Iterator[Transfer]:
        """To the holders that are no workers."""
        for number, field in enumerate(self.piece.fields):
            for share in field.shares:
                if share.holder not in self.workers:
                    nbytes = share.numel * field.dtype.itemsize
                    yield Transfer(self.workers[0], share.holder, number, share.boxes, nbytes)

    @property
    def traffic(self) -> Traffic:
        """The bytes of both."""
        if len(self.workers) == 1 and all(len(f.shares.copies) == len(f.shares) for f in self.piece.fields):
            return self._traffic_of_owner()
        ways: list[dict[int, int]] = []
        for transfers in (self.gathers, self.returns):
            sent, received = Counter[int](), Counter[int]()
            for transfer in transfers:
                sent[transfer.source] += transfer.nbytes
                received[transfer.target] += transfer.nbytes
            ways += [sent, received]
        return Traffic(*ways)

    @property
    def nbytes(self) -> int:
        """Bytes that travel, both ways."""
        return sum(self.traffic.gather_sent.values()) + sum(self.traffic.return_sent.values())

    @property
    def line(self) -> str:
        """All that the ranks must agree on."""
        piece, fields = self.piece, self.piece.fields
        dtypes, shares = [str(field.dtype) for field in fields], [field.shares.text for field in fields]
        return (
            f"param {piece.name!r} ({piece.rows}, {piece.cols}) {self.mode} {self.workers} {dtypes} {shares}"
        )

    def concerns(self, index: int) -> bool:
        """Whether a rank works on the piece or holds part of it."""
        return index in self.workers or any(index in field.shares.numel_of for field in self.piece.fields)

    def _nearest(self, copies: Sequence[Share], worker: int) -> Share:
        return copies[worker * len(copies) // self.num_ranks]  # replicas are the outer mesh axis

    def _traffic_of_owner(self) -> Traffic:
        """What one worker lacks comes from the others, and goes back to them."""
        (worker,) = self.workers
        passed = Counter[int]()
        for field in self.piece.fields:
            itemsize = field.dtype.itemsize
            passed.update({holder: numel * itemsize for holder, numel in field.shares.numel_of.items()})
        passed.pop(worker, None)
        total = {worker: passed.total()} if passed else {}
        return Traffic(passed, total, total, passed)


class Balance(NamedTuple):
    """The sums over ranks that the table ends with."""

    num_ranks: int
    mean_sent_bytes: float
    worst_bytes: int  # in + out of the busiest rank, both ways
    flops: float
    max_over_mean_flops: float


@dataclass(frozen=True)
class StepPlan:
    """What every rank does in a step for the pieces of one set of ranks."""

    assignments: tuple[Assignment, ...]
    num_ranks: int
    note: str = ""  # printed below the table

    @cached_property
    def digest(self) -> str:
        """sha256 of what the ranks must agree on."""
        return digest(self.lines)

    @property
    def lines(self) -> list[str]:
        """One line a piece, and the number of ranks."""
        return [*(assignment.line for assignment in self.assignments), f"{self.num_ranks} ranks"]

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Floating-point operations of each rank."""
        loads = [0.0] * self.num_ranks
        for assignment in self.assignments:
            for worker in assignment.workers:
                loads[worker] += assignment.piece.flops
        return tuple(loads)

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends in a step."""
        return self._passed[0]

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes that each rank receives in a step."""
        return self._passed[1]

    @cached_property
    def balance(self) -> Balance:
        """Bytes and operations over all ranks."""
        mean = sum(self.loads) / self.num_ranks
        return Balance(
            self.num_ranks,
            sum(self.sent) / self.num_ranks,
            max(map(add, self.sent, self.received)),
            sum(self.loads),
            max(self.loads) / mean if mean else 1.0,
        )

    @cached_property
    def _passed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sent, received = [0] * self.num_ranks, [0] * self.num_ranks
        for assignment in self.assignments:
            traffic = assignment.traffic
            for of_way in (traffic.gather_sent, traffic.return_sent):
                for index, nbytes in of_way.items():
                    sent[index] += nbytes
            for of_way in (traffic.gather_received, traffic.return_received):
                for index, nbytes in of_way.items():
                    received[index] += nbytes
        return tuple(sent), tuple(received)

    def __str__(self) -> str:
        names = [assignment.piece.name for assignment in self.assignments]
        width = max(map(len, ["piece", *names]))
        lines = []
        for name, a in zip(names, self.assignments, strict=True):
            who = ",".join(map(str, a.workers)) if len(a.workers) <= 4 else f"{len(a.workers)} ranks"
            shape = f"{a.piece.rows} x {a.piece.cols}"
            lines.append(
                f"{name:<{width}}  {shape:>15}  {a.mode:<9}  {who:>7}  {size_text(a.nbytes):>10}  "
                f"{a.piece.flops:9.2e}"
            )
        head = f"{'piece':<{width}}  {'matrix':>15}  {'mode':<9}  {'rank':>7}  {'moved':>10}  {'FLOPs':>9}"
        b = self.balance
        foot = (
            f"{b.num_ranks} ranks: each sends {size_text(round(b.mean_sent_bytes))} in the mean; the "
            f"busiest sends and receives {size_text(b.worst_bytes)}; {b.flops:.2e} FLOPs, busiest over "
            f"mean {b.max_over_mean_flops:.2f}"
        )
        return "\n".join([head, *lines, foot, *([self.note] if self.note else [])])


def plan_step(pieces: Sequence[Piece], num_ranks: int, placing: Sequence[Placing]) -> StepPlan:
    """Assign every piece of a step.

    Args:
        pieces: in the order of the parameters; indices of shares are below `num_ranks`.
        placing: for each piece "auto", or the mode that it must have.

    Raises:
        ValueError: a piece that must be local is cut.
    """
    modes = [_mode(piece, wish) for piece, wish in zip(pieces, placing, strict=True)]
    owners = _owners(pieces, modes, num_ranks)
    assignments = []
    for piece, mode, owner in zip(pieces, modes, owners, strict=True):
        holders = tuple(share.holder for share in piece.fields[0].shares)
        workers = holders if mode == "replicate" else (owner,)
        assignment = Assignment(piece, mode, workers, num_ranks)
        if mode == "local" and any(assignment.gathers):  # of its state
            assignment = replace(assignment, mode="owner")
        assignments.append(assignment)
    return StepPlan(tuple(assignments), num_ranks)


def fill_buckets(assignments: Sequence[Assignment], bucket_bytes: int) -> list[list[int]]:
    """Places of the assignments that travel, in buckets that let no rank send or receive more at once."""
    buckets: list[list[int]] = []
    filled = [Counter[int]() for _ in Traffic._fields]
    for place, assignment in enumerate(assignments):
        traffic = assignment.traffic
        if not any(traffic):
            continue
        if not buckets or any(
            already[index] + nbytes > bucket_bytes
            for already, added in zip(filled, traffic, strict=True)
            for index, nbytes in added.items()
        ):
            buckets.append([])
            for already in filled:
                already.clear()
        for already, added in zip(filled, traffic, strict=True):
            already.update(added)
        buckets[-1].append(place)
    return buckets


def _mode(piece: Piece, wish: Placing) -> Mode:
    num_holders = len(piece.fields[0].shares)
    if num_holders <= 1 and (piece.home is None or piece.home.rank == piece.fields[0].shares[0].holder):
        return "local"
    if wish == "local":
        fact = f"{num_holders} ranks hold parts of it" if num_holders > 1 else "another rank has its state"
        blocks = "Blocks.whole()" if piece.home is None else "block_for(p.shape, 'shampoo', block=..)"
        raise ValueError(
            f"param {piece.name!r}: expected on one rank, as placement='local' says, but {fact}. Shard it "
            f"with shard_placement_fn=lambda p: {blocks}, or use placement='auto'."
        )
    if piece.home is not None:
        return "owner"
    if wish != "auto":
        return wish
    return "replicate" if (num_holders - 1) * piece.nbytes <= TINY_BYTES else "owner"


def _owners(pieces: Sequence[Piece], modes: Sequence[Mode], num_ranks: int) -> list[int]:
    """One rank a piece by the hybrid rule; what many ranks work on only adds to their loads."""
    loads = [0.0] * num_ranks
    total = 0.0
    for piece, mode in zip(pieces, modes, strict=True):
        shares = piece.fields[0].shares
        total += piece.flops * (len(shares) if mode == "replicate" else 1)
        if mode == "replicate":
            for share in shares:
                loads[share.holder] += piece.flops
    owners = [-1] * len(pieces)
    for place, piece in enumerate(pieces):
        if piece.home is not None:
            owners[place] = piece.home.rank
            loads[piece.home.rank] += piece.flops
    single = [place for place, mode in enumerate(modes) if mode != "replicate" and owners[place] < 0]
    bound = max(total / num_ranks, *(pieces[place].flops for place in single), *loads, 0.0)
    least = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(least)
    for place in sorted(single, key=lambda place: (-pieces[place].flops, place)):
        piece = pieces[place]
        held = piece.fields[0].shares.numel_of
        fitting = [index for index in held if loads[index] + piece.flops <= SLACK * bound]
        if fitting:
            owner = max(fitting, key=lambda index: (held[index], -loads[index], -index))
        else:
            owner = _least_loaded(least, loads)
        loads[owner] += piece.flops
        heapq.heappush(least, (loads[owner], owner))
        owners[place] = owner
    return owners


def _least_loaded(least: list[tuple[float, int]], loads: Sequence[float]) -> int:
    """The top of a heap in which outdated entries are left behind."""
    while least[0][0] != loads[least[0][1]]:
        heapq.heappop(least)
    return least[0][1]


def size_text(nbytes: float) -> str:
    """Three digits and a decimal unit, as links are rated in."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"
