"""Run a function on several gloo ranks, each a forked process; raise the first failing rank's traceback."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist


def run_ranks(fn: Callable[..., None], world_size: int, *args: object, timeout: float = 60.0) -> None:
    """Call `fn(rank, world_size, *args)` on `world_size` ranks whose default group is gloo."""
    _warm_up()
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    workers = [
        context.Process(target=_run_rank, args=(fn, rank, world_size, port, pipes[rank][1], args))
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    for _, send in pipes:
        send.close()
    deadline, failures, open_ranks = time.monotonic() + timeout, {}, set(range(world_size))
    try:
        while open_ranks and not failures and time.monotonic() < deadline:
            for rank in sorted(open_ranks):
                if pipes[rank][0].poll(0.005):
                    try:
                        message = pipes[rank][0].recv()
                    except EOFError:
                        message = "died without a traceback"
                    open_ranks.discard(rank)
                    if message is not None:
                        failures[rank] = message
        if open_ranks and not failures:
            raise TimeoutError(f"ranks {sorted(open_ranks)} of {world_size} did not finish in {timeout} s")
    finally:
        for worker in workers:
            worker.join(0.5 if failures or open_ranks else 5)
            if worker.is_alive():
                worker.kill()
                worker.join()
    for rank, message in failures.items():
        raise AssertionError(f"rank {rank} of {world_size} failed:\n{message}")


def _run_rank(
    fn: Callable[..., None],
    rank: int,
    world_size: int,
    port: int,
    report: Connection,
    args: tuple[object, ...],
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        fn(rank, world_size, *args)
        dist.barrier()
        report.send(None)
    except BaseException:
        report.send(traceback.format_exc())
    os._exit(0)


@cache
def _warm_up() -> None:
    """One optimizer step before the first fork, or each child imports torch._dynamo on its own."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()
