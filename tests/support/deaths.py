"""Ranks that die, and what the others were told and how soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOON_S = 10.0  # a broken connection is seen at once: far below the 54 s that a group waits for a silent rank


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def leaving_word(folder: Path, rank: int) -> Iterator[None]:
    """Write down an error and how long it took to come, and let it pass.

    The rank leaves, as a program would, so that no other rank waits for this one.
    """
    start = time.monotonic()
    try:
        yield
    except Exception as error:
        told = f"{time.monotonic() - start:.1f}\n{type(error).__name__}: {error}"
        (folder / f"rank-{rank}").write_text(told)
        raise


def word_of(folder: Path, rank: int) -> tuple[float, str]:
    """Seconds until the error that a rank left, and its message."""
    seconds, message = (folder / f"rank-{rank}").read_text().split("\n", 1)
    return float(seconds), message
