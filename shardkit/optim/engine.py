"""Brings the pieces of a step to their workers and the results back, while others are worked on.

Takes a `StepPlan` and a `Work`, which reads and writes local tensors and does the arithmetic; knows no
algorithm. Buckets pass through three phases, several of them under way at once:

    messages      gather 0   gather 1   return 0   gather 2   return 1    ..
    arithmetic       pieces at home     bucket 0              bucket 1    ..
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.boxes import Box
from shardkit.collectives import Pending, Route, all_to_all
from shardkit.errors import CollectiveTimeoutError
from shardkit.optim.messages import Bucket, Message, Part, Schedule, schedule_of
from shardkit.optim.planning import StepPlan

NUM_IN_FLIGHT = 2  # gathers that are under way while one bucket is worked on
_TAG_BASE = 0x5AE0_0000  # above those of `collectives.new_route`


class Work(Protocol):
    """What an algorithm does with pieces; places are those of the plan's assignments."""

    def read(self, place: int, field: int, box: Box) -> Tensor:
        """The values of a field in a box of this rank's local tensor, of the box's size."""

    def compute(self, places: Sequence[int], fields: Sequence[list[Tensor]]) -> Sequence[list[Tensor]]:
        """The results for whole pieces: for each the tensors of its fields, shapes and dtypes as given."""

    def write(self, place: int, field: int, box: Box, values: Tensor) -> None:
        """Use the results that belong in a box of this rank's local tensor."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a plan: this one's index, and the group rank of each index.

    `route` is None where the plan has one rank.
    """

    index: int
    group_ranks: tuple[int, ...]
    route: Route | None


def route_of(plan: StepPlan, group: dist.ProcessGroup, backend: str) -> Route:
    """A route whose tag follows from the plan: a rank may have other plans beside it than its peers have."""
    return Route(group, backend, _TAG_BASE + 2 * (int(plan.digest[:6], 16) % 0x8_0000))


class Engine:
    """Runs one plan on one rank.

    Args:
        plan: the same on all its ranks.
        ranks: this rank's place among them.
        device: of the local tensors.
        bucket_bytes: most bytes that a rank sends or receives for one bucket, unless a piece is larger.
    """

    def __init__(self, plan: StepPlan, ranks: Ranks, device: torch.device, bucket_bytes: int) -> None:
        self.plan, self.ranks, self.device, self.bucket_bytes = plan, ranks, device, bucket_bytes
        self._schedules: dict[tuple[int, ...], Schedule] = {}

    def run(self, work: Work, active: Sequence[int]) -> None:
        """Gather, work on, and return the pieces at these places of the plan.

        Collective over the plan's ranks: all must call, with the same places.

        Raises:
            CollectiveTimeoutError: a peer died or did not come; it names the peers and the pieces.
        """
        schedule = self._schedule(tuple(active))
        to_start, gathers, returns = deque(schedule.traveling), deque[_Flight](), deque[_Flight]()
        while to_start and len(gathers) < NUM_IN_FLIGHT:
            gathers.append(self._gather(work, to_start.popleft()))
        for bucket in schedule.local:
            self._keep(work, bucket, self._compute(work, bucket, {}))
        while gathers:
            flight = gathers.popleft()
            self._wait(flight)
            if to_start:
                gathers.append(self._gather(work, to_start.popleft()))
            returns.append(self._return(work, flight))
            if len(returns) >= NUM_IN_FLIGHT:
                self._finish(work, returns.popleft())
        while returns:
            self._finish(work, returns.popleft())

    def _schedule(self, active: tuple[int, ...]) -> Schedule:
        """Steps with the same gradients missing, or none, share one."""
        if active not in self._schedules:
            self._schedules[active] = schedule_of(self.plan, self.ranks.index, active, self.bucket_bytes)
        return self._schedules[active]

    def _gather(self, work: Work, bucket: Bucket) -> _Flight:
        """Send what others work on; start to receive what this rank does."""
        sends = {}
        for message in bucket.gather_sends:
            sends[message.peer] = buffer = self._buffer(message)
            for part in message.parts:
                part.of_message(buffer).copy_(work.read(part.place, part.field, part.box))
        return self._fly(bucket, sends, bucket.gather_receives, back=False)

    def _return(self, work: Work, flight: _Flight) -> _Flight:
        """Work on what has arrived, send what belongs to others, and keep the rest."""
        bucket = flight.bucket
        results = self._compute(work, bucket, flight.arriving)
        sends = {}
        for message in bucket.return_sends:
            sends[message.peer] = buffer = self._buffer(message)
            for part in message.parts:
                part.of_message(buffer).copy_(_in_piece(results, part))
        returning = self._fly(bucket, sends, bucket.return_receives, back=True)
        self._keep(work, bucket, results)
        return returning

    def _finish(self, work: Work, flight: _Flight) -> None:
        """Use what came back."""
        self._wait(flight)
        for message in flight.receives:
            for part in message.parts:
                values = part.of_message(flight.arriving[message.peer])
                work.write(part.place, part.field, part.box, values)

    def _compute(self, work: Work, bucket: Bucket, arrived: dict[int, Tensor]) -> dict[int, list[Tensor]]:
        """The results for the pieces of a bucket, from this rank's parts and those that arrived."""
        whole = {
            place: [
                torch.empty(field.region.size, dtype=field.dtype, device=self.device)
                for field in self.plan.assignments[place].piece.fields
            ]
            for place in bucket.places
        }
        for part in bucket.own:
            _in_piece(whole, part).copy_(work.read(part.place, part.field, part.box))
        for message in bucket.gather_receives:
            for part in message.parts:
                _in_piece(whole, part).copy_(part.of_message(arrived[message.peer]))
        if not whole:
            return {}
        return dict(zip(whole, work.compute(tuple(whole), tuple(whole.values())), strict=True))

    def _keep(self, work: Work, bucket: Bucket, results: dict[int, list[Tensor]]) -> None:
        for part in bucket.own:
            work.write(part.place, part.field, part.box, _in_piece(results, part))

    def _fly(
        self, bucket: Bucket, sends: dict[int, Tensor], receives: Sequence[Message], back: bool
    ) -> _Flight:
        arriving = {message.peer: self._buffer(message) for message in receives}
        group_ranks, route = self.ranks.group_ranks, self.ranks.route
        assert route is not None
        try:
            pending = all_to_all(
                {group_ranks[peer]: buffer for peer, buffer in arriving.items()},
                {group_ranks[peer]: buffer for peer, buffer in sends.items()},
                route,
                "optimizer step",
                back=back,
            )
        except CollectiveTimeoutError as error:
            raise self._missed(error, receives) from error
        return _Flight(bucket, pending, arriving, receives, tuple(sends.values()))

    def _wait(self, flight: _Flight) -> None:
        try:
            flight.pending.wait()
        except CollectiveTimeoutError as error:
            raise self._missed(error, flight.receives) from error

    def _missed(self, error: CollectiveTimeoutError, receives: Sequence[Message]) -> CollectiveTimeoutError:
        """The error, with what should have come and from whom."""
        route = self.ranks.route
        assert route is not None
        ranks = dist.get_process_group_ranks(route.group)
        peers = sorted(ranks[self.ranks.group_ranks[message.peer]] for message in receives)
        places = dict.fromkeys(part.place for message in receives for part in message.parts)
        names = [self.plan.assignments[place].piece.name for place in places]
        what = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        waited = f"It waited for {what} from ranks {peers}. " if names else ""
        return CollectiveTimeoutError(
            f"{error} {waited}Every rank must call step() as often as the others, with gradients of the same "
            "parameters."
        )

    def _buffer(self, message: Message) -> Tensor:
        return torch.empty(message.nbytes, dtype=torch.uint8, device=self.device)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A bucket under way in one direction: the bytes that arrive, and those that must live until sent."""

    bucket: Bucket
    pending: Pending
    arriving: dict[int, Tensor]
    receives: Sequence[Message]
    leaving: tuple[Tensor, ...]


def _in_piece(whole: dict[int, list[Tensor]], part: Part) -> Tensor:
    """Where a part lies in its whole piece."""
    return whole[part.place][part.field][part.at]
