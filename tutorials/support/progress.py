"""What a run prints: each line once, not once a rank, and a progress bar."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist


def say(text: str, end: str = "\n") -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)


class ProgressBar:
    """A bar on one line; where the output is no terminal, about ten lines in all.

    Args:
        steps: the steps that this bar will see.
        total: the steps of the whole run, which the bar is long.
    """

    def __init__(self, steps: range, total: int) -> None:
        self.steps, self.total = steps, total
        self.start, self.live = time.monotonic(), sys.stdout.isatty()

    def update(self, step: int, news: str) -> None:
        """Draw the bar after `step`, with the news beside it."""
        done = step + 1
        last = done == self.steps.stop
        if self.live or last or done % max(1, self.total // 10) == 0:
            rate = (done - self.steps.start) / (time.monotonic() - self.start)
            bar = ("#" * (24 * done // self.total)).ljust(24, ".")
            end = "\r" if self.live and not last else "\n"
            say(f"[{bar}] {done}/{self.total}  {news}  {rate:.1f} steps/s", end)
