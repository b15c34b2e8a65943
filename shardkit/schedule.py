"""When to gather, prefetch and free: pure decisions over integers.

Level 1 of the data flow. Units are their index in the tree. Nothing here holds tensors or knows a device, so
every rule can be tested without processes, and the runtime cannot do anything that this page does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate


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
class UnitBytes:
    """What one unit may hold on one rank, in bytes."""

    shard: int  # its shard of the parameters
    transit: int  # the gathered buffer, where parameters must be copied out of it; 0 where they live in it
    unsharded: int  # the parameters as compute sees them
    reduce: int  # the buffer that a reduce-scatter consumes
    reduce_scratch: int  # what the reduction receives into
    reduced: int  # the gradients of the shard, in the reduce dtype
    grad: int  # the gradients of the shard, in the parameter's dtype
    largest_grad: int  # one unsharded gradient on its way into the reduce buffer
    kept: bool  # stays gathered from forward to backward


def predicted_peak_bytes(units: Sequence[UnitBytes]) -> int:
    """The most bytes of parameters and gradients alive at once in a forward and backward from no gradients.

    Units run in order, then in reverse, gathering one ahead in backward; at most one reduction is in flight.
    Activations and optimizer state are the caller's.
    """
    shards = sum(unit.shard for unit in units)
    kept = sum(unit.unsharded for unit in units if unit.kept)
    peak, grads = shards, 0
    gathered = 0  # kept units gathered so far
    for unit in units:
        peak = max(peak, shards + gathered + unit.transit + unit.unsharded)
        gathered += unit.unsharded if unit.kept else 0
    in_flight = 0  # the previous unit's reduction
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        ahead = units[index - 1] if index else None
        own = 0 if unit.kept else unit.unsharded
        prefetched = 0 if ahead is None or ahead.kept else max(ahead.transit, ahead.unsharded)
        gathering = 0 if unit.kept else unit.transit + unit.unsharded
        computing = own + prefetched + unit.reduce + unit.largest_grad
        peak = max(peak, shards + kept + grads + in_flight + max(gathering, computing))
        kept -= unit.unsharded if unit.kept else 0
        peak = max(
            peak, shards + kept + grads + prefetched + unit.reduce + unit.reduce_scratch + unit.reduced
        )
        in_flight = unit.reduce + unit.reduce_scratch + unit.reduced
        grads += unit.grad
    return peak
