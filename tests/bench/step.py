"""Forward+backward and the whole step of a 27 M transformer on 2 and 4 gloo ranks.

Six blocks of width 512, a vocabulary of 8,192, 128 tokens a rank, stock AdamW; a block is a unit, the rest is
the root's. A step's time is its slowest rank's, a launch's the median of its steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.bench.implementations import WRAPS, interleave
from tests.bench.table import Bar, Row, Samples, compare
from tests.support.models import Transformer
from tests.support.ranks import run_ranks

TITLE = "Training step, 27 M parameters, gloo"
VOCAB, NUM_TOKENS = 8192, 128
NUM_WARM_STEPS, NUM_STEPS = 2, 5
BARS = (
    Bar("shardkit", "forward+backward", 0.80),
    Bar("shardkit", "whole step", 0.80),
    Bar("shardkit-ragged", "forward+backward", 0.65),
    Bar("shardkit-ragged", "forward+backward", 1.05, of="shardkit"),
    Bar("shardkit-ragged", "whole step", 0.70),
    Bar("shardkit-ragged", "whole step", 1.05, of="shardkit"),
)


def measure(num_launches: int) -> Mapping[int, Samples]:
    """World size -> samples, in milliseconds."""

    def launch(world_size: int, name: str) -> Mapping[str, float]:
        of_ranks = run_ranks(train, world_size, name, timeout=120.0)
        return {
            quantity: 1e3 * median(map(max, zip(*(times[quantity] for times in of_ranks), strict=True)))
            for quantity in of_ranks[0]
        }

    return {
        world_size: interleave(tuple(WRAPS), num_launches, partial(launch, world_size))
        for world_size in (2, 4)
    }


def rows(samples: Mapping[int, Samples]) -> list[Row]:
    return [
        row
        for world_size, of_size in samples.items()
        for row in compare(f"{world_size} ranks", of_size, "ms", BARS)
    ]


def train(rank: int, world_size: int, name: str) -> dict[str, list[float]]:
    """Train a few steps as one rank; the seconds of each after the warm-up."""
    model = Transformer(vocab=VOCAB, dim=512, num_layers=6)
    wrapped = WRAPS[name](model, list(model.blocks), init_device_mesh("cpu", (world_size,)), None)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    tokens = torch.randint(VOCAB, (1, NUM_TOKENS + 1), generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[float]] = {"forward+backward": [], "whole step": []}
    for _ in range(NUM_WARM_STEPS + NUM_STEPS):
        dist.barrier()
        start = time.perf_counter()
        logits = wrapped(tokens[:, :-1])  # (1, NUM_TOKENS, VOCAB)
        F.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).backward()
        after_backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        times["forward+backward"].append(after_backward - start)
        times["whole step"].append(time.perf_counter() - start)
    return {quantity: values[NUM_WARM_STEPS:] for quantity, values in times.items()}
