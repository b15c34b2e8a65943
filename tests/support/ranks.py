"""Run a function on several gloo ranks, each a forked process, and raise here what failed there.

Forking costs 0.1 to 1 s where spawning costs 7, if the parent has imported what the ranks need (`warm_up`).
A rank leaves only after all have finished, so an early one never breaks a late one's connection. Whatever
happens, `run_ranks` returns or raises soon after `timeout` and leaves no process behind: what still runs is
killed by its pid, and each rank carries an alarm in case the parent itself was killed.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, TypeVarTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Kind = Literal["success", "assertion", "error", "exit", "hang", "echo"]
CAUSES_FIRST: tuple[Kind, ...] = ("assertion", "error", "exit", "hang", "echo")
GRACE_S = 10.0  # how long the others may take to report, once one rank has failed

# What gloo and the store say on a rank whose peer failed: a consequence, never the cause.
ECHO_TYPES = (RuntimeError, dist.DistBackendError, dist.DistStoreError, dist.DistNetworkError)
ECHO = re.compile(
    "Connection (closed|reset|refused)|Broken pipe|Timed out waiting|wait timeout|Application timeout",
    re.IGNORECASE,
)


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""


@dataclass(frozen=True, slots=True)
class Report:
    """How one rank ended: the pickled return value of a success, else the traceback or stack."""

    rank: int
    kind: Kind
    time: float
    payload: bytes = b""
    text: str = ""


class Limits(NamedTuple):
    """Seconds until a rank ends itself, and until one of its collectives gives up."""

    rank: float
    group: float

    @classmethod
    def of(cls, timeout: float, group_timeout: float | None) -> Limits:
        return cls(timeout + 2 * GRACE_S, 0.9 * timeout if group_timeout is None else group_timeout)


@dataclass(frozen=True, slots=True)
class Rank:
    """The parent's hold on one rank."""

    rank: int
    process: ForkProcess
    pipe: connection.Connection
    stack_file: Path


def run_ranks(
    fn: Callable[[int, int, *Ts], T],
    world_size: int,
    *args: *Ts,
    timeout: float = 60.0,
    group_timeout: float | None = None,
) -> list[T]:
    """Call `fn(rank, world_size, *args)` on `world_size` gloo ranks and return their results in rank order.

    Args:
        fn: runs in a forked process (so a closure will do), once the default group is initialised, torchrun's
            variables are set and the seed is 0. What it returns must be picklable; tensors travel by value.
        timeout: seconds for all ranks together, their start included, which takes some where cores are few.
        group_timeout: seconds that a collective waits for its peers; None is 0.9 of `timeout`.

    Raises:
        RankError: with the traceback of the rank that failed first: an assertion before other errors, these
            before an exit or a hang (shown by its stack), and the broken connections of their peers last.
    """
    warm_up()
    with (
        tempfile.TemporaryDirectory(prefix="ranks-") as folder,
        _started(fn, world_size, args, Path(folder), Limits.of(timeout, group_timeout)) as ranks,
    ):
        reports = _collect(ranks, timeout)
    failures = [report for report in reports if report.kind != "success"]
    if failures:
        first = min(failures, key=lambda report: (CAUSES_FIRST.index(report.kind), report.time))
        raise RankError(f"rank {first.rank} of {world_size}: {first.text}")
    return [cast(T, pickle.loads(report.payload)) for report in reports]


def errors_on_all_ranks(
    fn: Callable[[int, int], object],
    world_size: int,
    exc_type: type[Exception],
    *words: str,
    group_timeout: float | None = None,
) -> list[str]:
    """Check that `fn` raises `exc_type`, its message with all `words`, on every rank; return the messages."""

    def expect(rank: int, world_size: int) -> str:
        try:
            fn(rank, world_size)
        except exc_type as error:
            missing = [word for word in words if word not in str(error)]
            assert not missing, f"the {exc_type.__name__} lacks {missing}: {error}"
            return str(error)
        raise AssertionError(f"no {exc_type.__name__} was raised")

    return run_ranks(expect, world_size, group_timeout=group_timeout)


@functools.cache
def warm_up() -> None:
    """Do once in the parent what each forked rank would otherwise do for itself.

    The first optimizer step imports torch._dynamo, about a second a rank. How many threads a rank has is set
    in `tests/__init__.py`.
    """
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    torch.optim.AdamW([param]).step()


@contextmanager
def _started(
    fn: Callable[..., object], world_size: int, args: tuple[object, ...], folder: Path, limits: Limits
) -> Iterator[list[Rank]]:
    """The running ranks; on leaving, none of them runs any more."""
    context = get_context("fork")
    ranks: list[Rank] = []
    try:
        for rank in range(world_size):
            pipe, rank_pipe = context.Pipe()
            process = context.Process(
                target=_run_rank, args=(fn, rank, world_size, args, rank_pipe, folder, limits)
            )
            process.start()
            rank_pipe.close()
            ranks.append(Rank(rank, process, pipe, folder / f"stack-{rank}"))
        yield ranks
    finally:
        for held in ranks:
            held.process.kill()
            held.process.join()
            held.process.close()
            held.pipe.close()


def _collect(ranks: list[Rank], timeout: float) -> list[Report]:
    """One report a rank, in rank order; after the first failure the others have GRACE_S left."""
    deadline = time.monotonic() + timeout
    reports: dict[int, Report] = {}
    while len(reports) < len(ranks):
        waiting = [held for held in ranks if held.rank not in reports]
        ready = connection.wait(
            [end for held in waiting for end in (held.pipe, held.process.sentinel)],
            max(0.0, deadline - time.monotonic()),
        )
        if not ready:
            stacks = _stacks(waiting)
            reports |= {
                held.rank: Report(held.rank, "hang", time.monotonic(), text=f"still runs, at\n{stack}")
                for held, stack in zip(waiting, stacks, strict=True)
            }
        for held in waiting:
            if held.pipe in ready or held.process.sentinel in ready:
                reports[held.rank] = report = _receive(held)
                if report.kind != "success":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    return [reports[held.rank] for held in ranks]


def _receive(held: Rank) -> Report:
    """What the rank sent, or that it left without a word."""
    try:
        return cast(Report, pickle.loads(held.pipe.recv_bytes())) if held.pipe.poll() else _left(held)
    except EOFError:
        return _left(held)


def _left(held: Rank) -> Report:
    held.process.join()
    text = f"exited with code {held.process.exitcode} before it returned"
    return Report(held.rank, "exit", time.monotonic(), text=text)


def _stacks(hanging: list[Rank]) -> list[str]:
    """Where each hanging rank is, as it writes by itself when signalled."""
    for held in hanging:
        os.kill(cast(int, held.process.pid), signal.SIGUSR1)
    time.sleep(0.2)
    return [held.stack_file.read_text() if held.stack_file.exists() else "(unknown)" for held in hanging]


def _run_rank(
    fn: Callable[..., object],
    rank: int,
    world_size: int,
    args: tuple[object, ...],
    pipe: connection.Connection,
    folder: Path,
    limits: Limits,
) -> None:
    """The life of a rank: join the group, call, report, wait for the parent's kill."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(limits.rank) + 1)
    stack_file = (folder / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in local.items()}
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=limits.group),
        )
        report = Report(rank, "success", time.monotonic(), payload=pickle.dumps(fn(rank, world_size, *args)))
    except BaseException as error:
        report = Report(rank, _kind(error), time.monotonic(), text=traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(pickle.dumps(report))
    if report.kind == "success":
        signal.pause()


def _kind(error: BaseException) -> Kind:
    if isinstance(error, AssertionError):
        return "assertion"
    return "echo" if type(error) in ECHO_TYPES and ECHO.search(str(error)) else "error"
