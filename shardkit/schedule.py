"""When to gather, prefetch and free: pure decisions over integers.

Level 1 of the data flow. Units are their index in the tree. Nothing here holds tensors or knows a device, so
every rule can be tested without processes, and the runtime cannot do anything that this page does not say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary


@dataclass(slots=True)
class ForwardOrder:
    """The order in which units ran forward, consumed from its end by backward.

    Units may run several times before backward; each run has one backward. With forward order 0 1 2 1,
    backward visits 1 (prefetches 2), 2 (prefetches 1), 1 (prefetches 0), 0 (prefetches nothing).
    """

    _runs: list[int] = field(default_factory=list)
    _open: dict[int, list[int]] = field(default_factory=dict)  # unit -> positions not yet visited by backward

    def record(self, unit: int) -> None:
        """`unit` has run forward."""
        self._open.setdefault(unit, []).append(len(self._runs))
        self._runs.append(unit)

    def prefetch_for(self, unit: int) -> int | None:
        """The unit whose backward follows that of `unit`'s latest open run; consumes that run."""
        positions = self._open.get(unit)
        if not positions:
            return None  # a second backward over one graph: the order is spent, so gather on demand
        position = positions.pop()
        return self._runs[position - 1] if position > 0 else None

    def clear(self) -> None:
        """Backward is over."""
        self._runs.clear()
        self._open.clear()


class Boundary(NamedTuple):
    """Where a unit's forward begins, over inputs that need a gradient, or ends."""

    unit: int
    is_end: bool


@dataclass(eq=False, slots=True)
class Region:
    """What activation checkpointing runs again in one go, somewhere inside backward."""

    units: list[int] = field(default_factory=list)  # in the order of forward, each once


class Step(NamedTuple):
    """A place on a tape: what is to be undone there, if anything, and what it is run again with."""

    boundary: Boundary | None
    region: Region | None = None


class Tape:
    """What one outermost forward did, for a backward to undo from its end, on every rank alike.

    Where the losses of ranks use different units, their backwards visit different ones. A rank undoes what it
    passes over too, so that all of them gather and reduce the same units in the same order:

    forward on all ranks    begin 0, end 0, begin 1, end 1, begin 2, end 2
    this rank's loss uses 1 alone: its backward
      visits end 1          end 2, begin 2 are passed over
      visits begin 1        nothing is
      is over               end 0, begin 0 are

    Autograd visits what was computed last first, so that this order is its own.

    Units inside an activation checkpoint run forward again at a moment that depends on the loss. All of them
    are gathered before the first is undone, and stay until the last is, so that no moment makes a difference.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._num_left = 0  # those that the running backward has neither visited nor passed over
        self._regions: WeakKeyDictionary[object, Region] = WeakKeyDictionary()  # of a checkpoint

    def record(self, boundary: Boundary, checkpoints: Sequence[object | None] = ()) -> None:
        """Forward has come to `boundary`, inside `checkpoints`."""
        self._append(Step(boundary, self._region_of(checkpoints)))

    def rerun_later(self, unit: int, checkpoints: Sequence[object | None]) -> None:
        """`unit` begins to run forward, with or without a gradient, inside `checkpoints`, one in another."""
        region = self._region_of(checkpoints)
        if region is None:
            region = Region()
            self._append(Step(None, region))
        for checkpoint in checkpoints:
            if checkpoint is not None:
                self._regions[checkpoint] = region  # the outermost runs what is inside the others again
        if unit not in region.units:
            region.units.append(unit)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to undo."""
        return not self._steps

    def visit(self, boundary: Boundary) -> list[Step]:
        """What backward passes over on its way to the latest `boundary` left, in the order of backward.

        Where it then is comes last, without a boundary: to undo that is autograd's.
        """
        for position in range(self._num_left - 1, -1, -1):
            if self._steps[position].boundary == boundary:
                return self._pass_to(position, position)
        return []  # a second backward over one graph, or a unit that ran in part

    def rerun(self, unit: int) -> list[Step]:
        """The same on its way into the latest region left in which `unit` runs again."""
        for position in range(self._num_left - 1, -1, -1):
            region = self._steps[position].region
            if region is not None and unit in region.units:
                return self._pass_to(position, position + 1)
        return []

    def finish(self) -> list[Step]:
        """What backward has not come to, and now passes over."""
        rest, self._num_left = self._steps[: self._num_left], 0
        return rest[::-1]

    def rewind(self) -> None:
        """The backward is over; another one may begin from the end again."""
        self._num_left = len(self._steps)

    def _region_of(self, checkpoints: Sequence[object | None]) -> Region | None:
        known = [self._regions.get(checkpoint) for checkpoint in checkpoints if checkpoint is not None]
        return next((region for region in known if region is not None), None)

    def _append(self, step: Step) -> None:
        self._steps.append(step)
        self._num_left = len(self._steps)

    def _pass_to(self, position: int, num_left: int) -> list[Step]:
        passed = self._steps[position + 1 : self._num_left]
        self._num_left = num_left
        return [*passed[::-1], Step(None, self._steps[position].region)]


def reshards_after_forward(
    setting: bool | int | None, *, is_root: bool, with_grad: bool, pinned: bool
) -> bool:
    """Whether a unit frees its gathered parameters after forward.

    Args:
        setting: `reshard_after_forward`; None means True, but False for the root, which backward needs first.
        with_grad: a backward can follow. Without one nothing may outlive the forward, or the next one would
            see old weights.
        pinned: the user called `unshard()` and has not resharded since.
    """
    if setting is None:
        setting = not is_root
    if setting is not False:
        return True
    return not with_grad and not pinned


def grads_to_sweep(grad_bytes: Sequence[int], budget_bytes: int = 256 * 1024) -> frozenset[int]:
    """Which gradients wait for the end of their unit's backward: the smallest, 256 KiB of them at most.

    A call of its own for each is most of the host's time where parameters are small; the others are taken,
    and freed, as soon as they are there.
    """
    smallest_first = sorted(range(len(grad_bytes)), key=grad_bytes.__getitem__)
    totals = accumulate(grad_bytes[index] for index in smallest_first)
    pairs = zip(smallest_first, totals, strict=True)
    return frozenset(index for index, total in pairs if total <= budget_bytes)


@dataclass(frozen=True, slots=True)
class BucketBytes:
    """What one bucket holds on one rank at one time or another, in bytes of the device that computes."""

    shard: int  # its part of the parameters, at rest
    transit: int  # the gathered rows, where parameters are copied out of them; 0 where they live in them
    unsharded: int  # the parameters as compute sees them
    rows: int = 0  # what the reduction consumes, from the first gradient on; 0 where nothing trains
    late: int = 0  # of that, gradients that stay as they are and come after those of what lies inside
    row: int = 0  # what it receives; 0 where this rank's rows are all there is
    scratch: int = 0  # what else it allocates
    grad: int = 0  # the gradients at rest
    casts: bool = False  # the gradients are a copy of the row in another dtype, not the row itself


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """The buckets of one unit, and how the unit behaves.

    Units are listed as their forwards end: what lies inside a unit comes right before it.
    """

    buckets: tuple[BucketBytes, ...]
    loose: int = 0  # gradients that autograd has made and that wait, together, to be written into the rows
    first: int = 0  # a gradient that is there before the rows, or is to be one of them
    kept: int = 0  # of the gathered bytes, what stays from forward to backward
    num_inner: int = 0  # units before it that lie inside it, at any depth

    @property
    def unsharded(self) -> int:
        """The parameters of all buckets as compute sees them."""
        return sum(bucket.unsharded for bucket in self.buckets)


def peak_bytes(units: Sequence[UnitBytes], *, max_reductions: int = 1) -> int:
    """The most bytes of parameters and gradients alive at once in a forward and backward from no gradients.

    Units run once each in their order, backward gathers one ahead. Activations and optimizer state are the
    caller's; so is what an operator allocates inside itself.

    two units in a root of nothing, over 4 ranks: parameters 4, shard 1, rows 4, row 1, largest gradient 2

    forward   gather 0 and free it, gather 1 and free it              2 + transit 4 + unsharded 4     = 10
    backward  gather 1, start to gather 0                             2 + unsharded 4 + transit 4     = 10
              a gradient of 1, then its rows                                                  + 2 + 4 = 16
              free 1, reduce it                                       2 + transit 4 + rows 4 + row 1  = 11
              the gather of 0 completes                                                           + 4 = 15
              a gradient of 0, while 1 is being reduced, then its rows instead         2 + 4 + 5 + 2  = 13
    """
    step = _Step(units, max_reductions)
    step.take(sum(bucket.shard for unit in units for bucket in unit.buckets))
    roots = step.children(len(units), len(units))
    for root in roots:
        step.forward(root)
    for root in reversed(roots):
        step.backward(root)
    step.finish_reductions(limit=1)
    return step.peak


class _Step:
    """The bytes alive in one forward and backward, as they come and go."""

    def __init__(self, units: Sequence[UnitBytes], max_reductions: int) -> None:
        self._units, self._max_reductions = units, max_reductions
        self._started: set[int] = set()  # gathers under way
        self._reducing: deque[BucketBytes] = deque()
        self._live = self.peak = 0

    def take(self, *nbytes: int) -> None:
        """Bytes are allocated."""
        self._live += sum(nbytes)
        self.peak = max(self.peak, self._live)

    def give(self, *nbytes: int) -> None:
        """Bytes are freed."""
        self._live -= sum(nbytes)

    def children(self, end: int, num_inner: int) -> list[int]:
        """The outermost of the `num_inner` units before `end`, in forward order."""
        found, start = [], end - num_inner
        while end > start:
            found.append(end - 1)
            end -= 1 + self._units[end - 1].num_inner
        return found[::-1]

    def forward(self, index: int) -> None:
        """Gather, run what lies inside, free."""
        unit = self._units[index]
        self._gather(index)
        for inner in self.children(index, unit.num_inner):
            self.forward(inner)
        if unit.kept < unit.unsharded:
            if unit.kept:  # a piece of the rows, which are put together again where they are not there
                transit = sum(bucket.transit for bucket in unit.buckets)
                self.take(unit.kept, transit)
                self.give(transit)
            self.give(unit.unsharded)

    def backward(self, index: int) -> None:
        """Gather, gather one ahead, take the gradients of what lies inside and its own, free, reduce."""
        unit = self._units[index]
        if unit.kept < unit.unsharded:
            self._gather(index)
            self.give(unit.kept)
        if index > 0 and self._units[index - 1].kept < self._units[index - 1].unsharded:
            self._start_gather(index - 1)
        self.take(unit.loose)
        if any(bucket.rows for bucket in unit.buckets):
            self.take(unit.first)
            self.finish_reductions(self._max_reductions)
            self.give(unit.first)
            self.take(*(bucket.rows - bucket.late for bucket in unit.buckets))
        if unit.num_inner:  # its first gradients came before those of what lies inside, the last come after
            self.give(unit.loose)
            for inner in reversed(self.children(index, unit.num_inner)):
                self.backward(inner)
            self.take(unit.loose)
        self.take(*(bucket.late for bucket in unit.buckets))
        self.give(unit.loose, unit.unsharded)
        for bucket in unit.buckets:
            if bucket.rows:
                self.finish_reductions(self._max_reductions)
                self.take(bucket.row, bucket.scratch)
                self._reducing.append(bucket)

    def finish_reductions(self, limit: int) -> None:
        """Finish the oldest reductions until fewer than `limit` are in flight."""
        while len(self._reducing) >= limit:
            bucket = self._reducing.popleft()
            self.give(bucket.scratch)
            if bucket.casts:
                self.take(bucket.grad)
                self.give(bucket.rows, bucket.row)
            else:
                self.give(bucket.rows, bucket.row)
                self.take(bucket.grad)

    def _start_gather(self, index: int) -> None:
        self._started.add(index)
        self.take(*(bucket.transit or bucket.unsharded for bucket in self._units[index].buckets))

    def _gather(self, index: int) -> None:
        if index not in self._started:
            self._start_gather(index)
        self._started.remove(index)
        for bucket in self._units[index].buckets:
            if bucket.transit:
                self.take(bucket.unsharded)
                self.give(bucket.transit)
