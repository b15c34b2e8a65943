"""Which rows are stepped together: enough for an operator to be worth its call, few enough for the cache.

Pure integers. Small parameters share a batch, large ones are taken in several:

    rows 100, 60, 3000 of 256 columns, at most 256,000 elements       batch 0: a[0:100] b[0:60] c[0:840]
                                                                      batch 1: c[840:1840] ..
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class RowRange(NamedTuple):
    """A range of rows of one of several matrices."""

    matrix: int
    start: int
    stop: int


@lru_cache(maxsize=1024)
def batches_of_rows(num_rows: tuple[int, ...], max_rows: int) -> tuple[tuple[RowRange, ...], ...]:
    """Every row of matrices of `num_rows` rows once and in order, in batches of at most `max_rows`."""
    batches: list[list[RowRange]] = [[]]
    room = max_rows
    for index, count in enumerate(num_rows):
        start = 0
        while start < count:
            if not room:
                batches.append([])
                room = max_rows
            stop = min(count, start + room)
            batches[-1].append(RowRange(index, start, stop))
            room, start = room - (stop - start), stop
    return tuple(tuple(batch) for batch in batches if batch)
