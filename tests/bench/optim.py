"""A step of torch's own AdamW on 300 small sharded parameters: default loop, foreach and fused.

On a fake process group of 8 a rank holds 1/8 of each matrix, 512 numbers: what is compared is how much each
parameter type adds to the optimizer's own time. `plain` is the same local tensors with no type around them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.bench.host import fake_mesh
from tests.bench.implementations import SHARDED, WRAPS, interleave
from tests.bench.table import Bar, Row, Samples, compare
from tests.support.ranks import run_ranks

TITLE = "Stock AdamW step, 300 parameters, fake group of 8"
NUM_PARAMS, NUM_UNITS, DIM = 300, 25, 64
NUM_WARM_STEPS, NUM_STEPS = 3, 15
VARIANTS: Mapping[str, Mapping[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
BARS = (
    *(Bar("shardkit", variant, 1.05) for variant in VARIANTS),
    Bar("shardkit-ragged", "default", 0.75),
    Bar("shardkit-ragged", "foreach", 1.25),
    Bar("shardkit-ragged", "fused", 0.50),
)


def measure(num_launches: int) -> Samples:
    """Milliseconds a step."""
    return interleave(("plain", *SHARDED), num_launches, lambda name: run_ranks(time_steps, 1, name)[0])


def rows(samples: Samples) -> list[Row]:
    return compare(f"{NUM_PARAMS} matrices of {DIM} x {DIM}", samples, "ms", BARS)


def time_steps(rank: int, world_size: int, name: str) -> dict[str, float]:
    """The median step of each variant of AdamW, in milliseconds."""
    params = sharded_params(name)
    return {variant: time_variant(params, options) for variant, options in VARIANTS.items()}


def sharded_params(name: str) -> list[Tensor]:
    """300 parameters with zero gradients: the fake group fills none, and stale memory may be denormal."""
    mesh = fake_mesh()
    units = [
        nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(NUM_PARAMS // NUM_UNITS)))
        for _ in range(NUM_UNITS)
    ]
    model = nn.Sequential(*units)
    wrapped = WRAPS["fsdp2" if name == "plain" else name](model, units, mesh, None)
    wrapped(torch.zeros(1, DIM)).sum().backward()
    params = list(wrapped.parameters())
    for param in params:
        param.grad.zero_()
    return [plain_local(param) for param in params] if name == "plain" else params


def plain_local(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    local = nn.Parameter(param.to_local().detach().clone())
    local.grad = torch.zeros_like(local)
    return local


def time_variant(params: Sequence[Tensor], options: Mapping[str, bool]) -> float:
    optimizer = torch.optim.AdamW(params, lr=1e-4, **options)
    times = []
    for _ in range(NUM_WARM_STEPS + NUM_STEPS):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[NUM_WARM_STEPS:])
