"""What one rank sends, receives and works on, bucket by bucket: pure, from a plan and the rank's index.

[Note: message order] Both ends list the parts of a message alike: fields of wide dtypes first, so that views
of the bytes are aligned, then pieces in plan order, then the shares' own order. Nothing else is sent along.

    bucket 0, 3 ranks; rank 1 works on p, rank 2 on q       rank 0 -> 1: p's row 0      rank 0 -> 2: q's row 0
                                                            rank 1 -> 2: q's rows 1, 2
    and back the same way
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardkit.boxes import Box
from shardkit.optim.pieces import Field
from shardkit.optim.planning import StepPlan, Transfer, fill_buckets


class Part(NamedTuple):
    """One box of one field of a piece: where the holder has it, and where it lies in the whole piece."""

    place: int  # of the piece in the plan
    field: int
    box: Box
    at: tuple[slice, ...]
    dtype: torch.dtype
    offset: int  # in bytes of the message

    def of_message(self, buffer: Tensor) -> Tensor:
        """The part in the bytes of its message, of the box's size."""
        nbytes = math.prod(self.box.size) * self.dtype.itemsize
        return buffer[self.offset : self.offset + nbytes].view(self.dtype).view(self.box.size)


class Message(NamedTuple):
    """All parts between this rank and one peer, by its index."""

    peer: int
    parts: tuple[Part, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces whose parts travel together, as one rank sees them.

    Args:
        places: those that this rank works on.
        own: the parts of these that it holds itself.
    """

    places: tuple[int, ...]
    own: tuple[Part, ...]
    gather_sends: tuple[Message, ...]
    gather_receives: tuple[Message, ...]
    return_sends: tuple[Message, ...]
    return_receives: tuple[Message, ...]


class Schedule(NamedTuple):
    """The buckets of a step in order, and those of pieces that need no message."""

    traveling: tuple[Bucket, ...]
    local: tuple[Bucket, ...]


def schedule_of(plan: StepPlan, index: int, active: Sequence[int], bucket_bytes: int) -> Schedule:
    """What the rank at `index` does for the pieces at the places `active` of the plan."""
    filled = fill_buckets([plan.assignments[place] for place in active], bucket_bytes)
    buckets = [[active[i] for i in bucket] for bucket in filled]
    traveling = {place for bucket in buckets for place in bucket}
    at_home = [p for p in active if p not in traveling and index in plan.assignments[p].workers]
    return Schedule(
        tuple(_bucket(plan, index, places) for places in buckets),
        tuple(_bucket(plan, index, places) for places in _batches(plan, at_home, bucket_bytes)),
    )


def _bucket(plan: StepPlan, index: int, places: Sequence[int]) -> Bucket:
    assignments = {place: a for place in places if (a := plan.assignments[place]).concerns(index)}
    gathers = [(place, t) for place, a in assignments.items() for t in a.gathers]
    returns = [(place, t) for place, a in assignments.items() for t in a.returns]
    workplaces = tuple(place for place, a in assignments.items() if index in a.workers)
    return Bucket(
        workplaces,
        tuple(part for place in workplaces for part in _own_parts(plan, index, place)),
        *_messages(plan, index, gathers),
        *_messages(plan, index, returns),
    )


def _own_parts(plan: StepPlan, index: int, place: int) -> list[Part]:
    return [
        _part(field, place, number, box, 0)
        for number, field in enumerate(plan.assignments[place].piece.fields)
        for share in field.shares
        if share.holder == index
        for box in share.boxes
    ]


def _messages(
    plan: StepPlan, index: int, transfers: Sequence[tuple[int, Transfer]]
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """What this rank sends, and what it receives."""
    sends: dict[int, list[tuple[int, Transfer]]] = {}
    receives: dict[int, list[tuple[int, Transfer]]] = {}
    for place, transfer in transfers:
        if transfer.source == index:
            sends.setdefault(transfer.target, []).append((place, transfer))
        elif transfer.target == index:
            receives.setdefault(transfer.source, []).append((place, transfer))
    return (
        tuple(_message(plan, peer, of_peer) for peer, of_peer in sends.items()),
        tuple(_message(plan, peer, of_peer) for peer, of_peer in receives.items()),
    )


def _message(plan: StepPlan, peer: int, transfers: Sequence[tuple[int, Transfer]]) -> Message:
    """See [Note: message order]; sorting keeps the order of equals."""
    fields = [plan.assignments[place].piece.fields[t.field] for place, t in transfers]
    wide_first = sorted(range(len(fields)), key=lambda i: -fields[i].dtype.itemsize)
    parts: list[Part] = []
    end = 0
    for i in wide_first:
        place, transfer = transfers[i]
        for box in transfer.boxes:
            parts.append(_part(fields[i], place, transfer.field, box, end))
            end += math.prod(box.size) * fields[i].dtype.itemsize
    return Message(peer, tuple(parts), end)


def _part(field: Field, place: int, number: int, box: Box, offset: int) -> Part:
    starts = field.region.offset
    at = tuple(slice(a - b, a - b + n) for a, b, n in zip(box.offset, starts, box.size, strict=True))
    return Part(place, number, box, at, field.dtype, offset)


def _batches(plan: StepPlan, places: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """A few pieces at a time: all of them whole would be a copy of the model."""
    batches: list[list[int]] = []
    filled = 0
    for place in places:
        nbytes = plan.assignments[place].piece.nbytes
        if not batches or filled + nbytes > bucket_bytes:
            batches.append([])
            filled = 0
        batches[-1].append(place)
        filled += nbytes
    return batches
