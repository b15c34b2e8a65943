"""Host time that wrapping adds to a unit and step: hooks, bookkeeping and calls, without communication.

On a fake process group of 8, where a collective returns at once: 24 units of 12 small parameters. The time of
the same model unwrapped is subtracted, launch by launch.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.bench.implementations import SHARDED, WRAPS, interleave
from tests.bench.table import Bar, Row, Samples, compare
from tests.support.ranks import run_ranks

TITLE = "Host time a unit and step, fake group of 8, compute subtracted"
WORLD_SIZE, NUM_UNITS, DIM = 8, 24, 16
NUM_WARM_STEPS, NUM_STEPS = 3, 20
QUANTITY = "forward+backward"
BARS = (
    Bar("shardkit", QUANTITY, 0.35),
    Bar("shardkit-ragged", QUANTITY, 0.25),
    Bar("shardkit-ragged", QUANTITY, 1.05, of="shardkit"),
)


def measure(num_launches: int) -> Samples:
    """Milliseconds a unit and step, compute included."""
    return interleave(
        ("bare", *SHARDED), num_launches, lambda name: {QUANTITY: run_ranks(time_unit, 1, name)[0]}
    )


def rows(samples: Samples) -> list[Row]:
    """Rows of what is left when the bare model's time is taken away."""
    compute = samples["bare"][QUANTITY]
    added = {
        name: {QUANTITY: [ms - bare_ms for ms, bare_ms in zip(quantities[QUANTITY], compute, strict=True)]}
        for name, quantities in samples.items()
        if name != "bare"
    }
    return compare(f"{NUM_UNITS} units of 12 parameters", added, "ms", BARS)


def time_unit(rank: int, world_size: int, name: str) -> float:
    """The median step of this process as rank 0 of the fake group, in milliseconds a unit."""
    mesh = fake_mesh()
    units = [nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(6))) for _ in range(NUM_UNITS)]
    model = nn.Sequential(*units)
    wrapped = WRAPS[name](model, units, mesh, None)
    x = torch.zeros(1, DIM)
    times = []
    for _ in range(NUM_WARM_STEPS + NUM_STEPS):
        start = time.perf_counter()
        wrapped(x).sum().backward()
        times.append(time.perf_counter() - start)
        wrapped.zero_grad()
    return 1e3 * median(times[NUM_WARM_STEPS:]) / NUM_UNITS


def fake_mesh() -> DeviceMesh:
    """Leave the default group and be rank 0 of a fake one of 8."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    return init_device_mesh("cpu", (WORLD_SIZE,))
