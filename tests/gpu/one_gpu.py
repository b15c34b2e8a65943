"""What the GPU tests share: rank 0 of a group on one GPU, in a process of its own.

The tests of the CPU fork their ranks, and a process that has started CUDA cannot fork ranks that use it. So
nothing here, the question whether there is a GPU included, starts CUDA in pytest's own process: each test
body runs in a forked rank. That also gives every test fresh memory statistics.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardkit.gather
import shardkit.reduction
from shardkit.collectives import Pending, Route
from tests import VISIBLE_GPUS
from tests.support.ranks import run_ranks

T = TypeVar("T")


def show_gpus() -> None:
    """Let this process see what `tests/__init__.py` hides."""
    if VISIBLE_GPUS is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = VISIBLE_GPUS


def num_gpus() -> int:
    """How many there are; device_count asks the driver's library, and does not start CUDA here."""
    show_gpus()
    try:
        return torch.cuda.device_count()
    finally:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


needs_gpu = pytest.mark.skipif(num_gpus() == 0, reason="needs an NVIDIA GPU; there is none")


def run_on_gpu(body: Callable[[], T], *, fake_ranks: int = 0, timeout: float = 110.0) -> T:
    """Call `body` with a default group of one NCCL rank, or as rank 0 of a fake group, on GPU 0.

    Args:
        body: what it returns must be picklable.
        fake_ranks: size of a group whose collectives return at once and move nothing. 0: NCCL.
    """

    def on_rank(rank: int, world_size: int) -> T:
        show_gpus()
        dist.destroy_process_group()
        torch.cuda.set_device(0)
        if fake_ranks:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=fake_ranks)
        else:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        result = body()
        torch.cuda.synchronize()
        return result

    return run_ranks(on_rank, 1, timeout=timeout)[0]


def replace_collectives(full: Mapping[str, Tensor], before: Callable[[], None]) -> None:
    """Give the fake group of two, in this process, collectives that do what two equal ranks would.

    Args:
        full: what a gather writes, by the unit's label: the one parameter of that unit.
        before: called on the collective's stream before anything is written, for example to be slow.
    """

    def all_gather(output: Tensor, row: Tensor, route: Route, label: str) -> Pending:
        before()
        output.copy_(full[label].flatten())
        return Pending([], "all_gather", label, route)

    def reduce_scatter(
        output: Tensor, rows: Tensor, route: Route, label: str, *, average: bool = False
    ) -> Pending:
        before()
        output.copy_(rows[0]).mul_(1 if average else 2)
        return Pending([], "reduce_scatter", label, route)

    shardkit.gather.all_gather = all_gather
    shardkit.reduction.reduce_scatter = reduce_scatter


class Spinner:
    """Keeps the current stream busy for tens of milliseconds, by matrix products of its own."""

    def __init__(self, size: int = 4096, num_products: int = 20) -> None:
        self._factor = torch.ones(size, size, device="cuda")
        self._product = torch.empty_like(self._factor)
        self._num_products = num_products
        self()  # loads the kernel, which waits for the device the first time
        torch.cuda.synchronize()

    def __call__(self) -> None:
        with torch.no_grad():
            for _ in range(self._num_products):
                torch.mm(self._factor, self._factor, out=self._product)
