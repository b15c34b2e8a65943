"""Where to cut a row of blocks into runs, one for each rank in order, so that the least travels.

Pure: costs, prices and rooms in, starts out. Neighbours may share what lies between them in several ways, and
each start of a run has a price, what travels then, from any zero:

    blocks                        0   1   2   3   4   5        rank 0 holds 0, 1 and a quarter of 2 and 3
    rank 1 starts at 2            0   0   1   1   1   1        price 0
                  at 3            0   0   0   1   1   1        price 1/2: of block 2 three quarters, not one
                  at 4            0   0   0   0   1   1        price 1

The price of all runs is the sum of the prices of their starts. So one pass over the ranks finds the least:
it keeps, for every start of a rank's run, the least price of all runs before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Starts(NamedTuple):
    """Where the run of a rank may start: at block `first` for the first price, at the next for the next."""

    first: int
    prices: Sequence[float]


def cut_runs(costs: Sequence[float], starts: Sequence[Starts], rooms: Sequence[float]) -> list[int]:
    """Where the run of each rank starts, with the last entry where that of the last one ends.

    Args:
        costs: of the blocks, in order; positive.
        starts: of each rank but the first, which starts at block 0.
        rooms: the cost that each rank may be given. If blocks cannot be cut so, all get the same excess,
            half a block or the least of its doublings that is enough.
    """
    ends = [0.0, *accumulate(costs)]
    excess = 0.0
    while (found := _cheapest(ends, starts, [room + excess for room in rooms])) is None:
        excess = max(2 * excess, max(costs) / 2)
    return found


def _cheapest(ends: Sequence[float], starts: Sequence[Starts], rooms: Sequence[float]) -> list[int] | None:
    """The starts of the least price, None if every way gives some rank more than its room."""
    rounding = 1e-9 * ends[-1]
    before = Starts(0, [0.0])  # the starts of the rank at hand, each with the least price up to it
    chosen = []  # for each start of the next rank: which of these leads to it
    for room, after in zip(rooms, [*starts, Starts(len(ends) - 1, [0.0])], strict=True):
        low, prices, origins = 0, [], []
        for start, price in enumerate(after.prices, after.first):
            while low < len(before.prices) and ends[start] - ends[before.first + low] > room + rounding:
                low += 1
            fitting = before.prices[low : max(low, start - before.first + 1)]
            least = min(fitting, default=math.inf)
            prices.append(least + price)
            origins.append(before.first + low + fitting.index(least) if fitting else -1)
        if min(prices) == math.inf:
            return None
        chosen.append((after.first, origins))
        before = Starts(after.first, prices)
    found = [len(ends) - 1]
    for first, origins in reversed(chosen):
        found.append(origins[found[-1] - first])
    return found[::-1]
