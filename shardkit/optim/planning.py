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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who works on a piece, and what travels: to the workers, and back to the other holders."""

    piece: Piece
    mode: Mode
    workers: tuple[int, ...]
    gathers: tuple[Transfer, ...]
    returns: tuple[Transfer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that travel, both ways."""
        return sum(t.nbytes for t in (*self.gathers, *self.returns))

    @property
    def line(self) -> str:
        """All that the ranks must agree on."""
        shares = [(s.holder, [b[:2] for b in s.boxes]) for f in self.piece.fields for s in f.shares]
        dtypes = [str(field.dtype) for field in self.piece.fields]
        piece = self.piece
        return (
            f"param {piece.name!r} ({piece.rows}, {piece.cols}) {self.mode} {self.workers} {dtypes} {shares}"
        )


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

    def sent_bytes(self, index: int) -> int:
        """Bytes that a rank sends in a step."""
        return sum(t.nbytes for t in self.transfers() if t.source == index)

    @cached_property
    def balance(self) -> Balance:
        """Bytes and operations over all ranks."""
        total, touched = 0, Counter[int]()
        for transfer in self.transfers():
            total += transfer.nbytes
            touched[transfer.source] += transfer.nbytes
            touched[transfer.target] += transfer.nbytes
        mean = sum(self.loads) / self.num_ranks
        return Balance(
            self.num_ranks,
            total / self.num_ranks,
            max(touched.values(), default=0),
            sum(self.loads),
            max(self.loads) / mean if mean else 1.0,
        )

    def transfers(self) -> Iterator[Transfer]:
        """All that travels, both ways."""
        for assignment in self.assignments:
            yield from assignment.gathers
            yield from assignment.returns

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
        gathers, returns = _transfers_of(piece, workers, num_ranks)
        moved = "owner" if mode == "local" and gathers else mode
        assignments.append(Assignment(piece, moved, workers, gathers, returns))
    return StepPlan(tuple(assignments), num_ranks)


def fill_buckets(assignments: Sequence[Assignment], bucket_bytes: int) -> list[list[int]]:
    """Places of the assignments that travel, in buckets that let no rank send or receive more at once."""
    buckets: list[list[int]] = []
    filled = Counter[tuple[str, str, int]]()
    for place, assignment in enumerate(assignments):
        if not assignment.gathers and not assignment.returns:
            continue
        added = Counter[tuple[str, str, int]]()
        for phase, transfers in (("gather", assignment.gathers), ("return", assignment.returns)):
            for transfer in transfers:
                added[phase, "sent", transfer.source] += transfer.nbytes
                added[phase, "received", transfer.target] += transfer.nbytes
        if not buckets or any(filled[key] + nbytes > bucket_bytes for key, nbytes in added.items()):
            buckets.append([])
            filled.clear()
        filled += added
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
        held = {share.holder: share.numel for share in piece.fields[0].shares}
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


def _transfers_of(
    piece: Piece, workers: tuple[int, ...], num_ranks: int
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """To the workers what they lack, of copies from those in their replica, and back to all other holders."""
    gathers, returns = [], []
    for number, field in enumerate(piece.fields):
        for copies in _copies(field.shares):
            nbytes = copies[0].numel * field.dtype.itemsize
            holders = {share.holder for share in copies}
            for worker in workers:
                if worker not in holders:
                    share = copies[worker * len(copies) // num_ranks]  # replicas are the outer mesh axis
                    gathers.append(Transfer(share.holder, worker, number, share.boxes, nbytes))
            for share in copies:
                if share.holder not in workers:
                    returns.append(Transfer(workers[0], share.holder, number, share.boxes, nbytes))
    return tuple(gathers), tuple(returns)


def _copies(shares: Sequence[Share]) -> list[list[Share]]:
    """The shares, those that are copies of one another together."""
    alike: dict[tuple[object, ...], list[Share]] = {}
    for share in shares:
        alike.setdefault(tuple((box.offset, box.size) for box in share.boxes), []).append(share)
    return list(alike.values())


def size_text(nbytes: float) -> str:
    """Three digits and a decimal unit, as links are rated in."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"
