"""shardkit's own optimizers: a Muon step on gloo ranks, and AdamW on 300 small sharded parameters.

Muon's step is timed against torch.optim.Muon on FSDP2's DTensors, whose operators gather inside Newton and
Schulz, and against gathering every matrix in bfloat16 and iterating on all ranks. AdamW's is timed against
torch's default one on FSDP2's parameters, of which a rank of the fake group of 8 holds 512 numbers each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardkit.optim import AdamW, Muon
from shardkit.optim.newton_schulz import TABLES, newton_schulz
from shardkit.ragged import distribute_tensor
from tests.bench.implementations import interleave
from tests.bench.optim import sharded_params
from tests.bench.table import Bar, Row, Samples, compare
from tests.support.ranks import run_ranks

TITLE = "Step of shardkit.optim: Muon on gloo ranks, AdamW on a fake group of 8"
SHAPES = [(256, 256)] * 8 + [(1024, 256)] * 4 + [(256, 1024)] * 4
WORLD_SIZES = (2, 4)
NUM_WARM_STEPS, NUM_STEPS = 1, 3
MUONS = ("fsdp2", "gathered", "shardkit")
ADAMWS = ("fsdp2", "shardkit", "shardkit-ragged")
MUON_BARS = (Bar("shardkit", "muon", 0.5), Bar("shardkit", "muon", 1.0, of="gathered"))
ADAMW_BARS = (Bar("shardkit", "adamw", 0.15), Bar("shardkit-ragged", "adamw", 0.15))


def measure(num_launches: int) -> dict[str, Samples]:
    """Milliseconds a step, by case."""
    found: dict[str, Samples] = {}
    for world_size in WORLD_SIZES:
        found[f"Muon, {len(SHAPES)} matrices, {world_size} ranks"] = interleave(
            MUONS,
            num_launches,
            lambda name, n=world_size: {"muon": max(run_ranks(time_muon, n, name))},  # type: ignore[misc]
        )
    found["AdamW, 300 matrices of 64 x 64"] = interleave(
        ADAMWS, num_launches, lambda name: {"adamw": run_ranks(time_adamw, 1, name)[0]}
    )
    return found


def rows(samples: dict[str, Samples]) -> list[Row]:
    """One case after another."""
    return [
        row
        for case, of_case in samples.items()
        for row in compare(case, of_case, "ms", MUON_BARS if case.startswith("Muon") else ADAMW_BARS)
    ]


def time_muon(rank: int, world_size: int, name: str) -> float:
    """The median step on this rank, in milliseconds."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in SHAPES]
    for param in params:
        param.grad = distribute_tensor(torch.randn(param.shape), mesh, [Shard(0)])
    if name == "gathered":
        return time_steps(lambda: step_gathered(params))
    make = {"fsdp2": torch.optim.Muon, "shardkit": Muon}[name]
    return time_steps(make(params).step)


def step_gathered(params: list[nn.Parameter]) -> None:
    """One all-gather a matrix in bfloat16, and Newton and Schulz on every rank; no momentum even."""
    with torch.no_grad():
        for param in params:
            assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
            whole: Tensor = param.grad.bfloat16().full_tensor()
            update = newton_schulz(whole, TABLES["jordan"])
            own = param.to_local()
            own.add_(update.chunk(dist.get_world_size())[dist.get_rank()], alpha=-1e-3)


def time_adamw(rank: int, world_size: int, name: str) -> float:
    """The median step on the fake group, in milliseconds."""
    params = sharded_params(name)
    make = torch.optim.AdamW if name == "fsdp2" else AdamW
    return time_steps(make(params, lr=1e-4).step, 10)


def time_steps(step: Callable[[], object], num_steps: int = NUM_STEPS) -> float:
    times = []
    for _ in range(NUM_WARM_STEPS + num_steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[NUM_WARM_STEPS:])
