"""AdamW8bit against torchao's, eager, on the same tensors, and the bytes that its state takes.

One process, one thread: no step communicates, so that is what a rank does. torchao steps one parameter after
another; here small ones go together, and large ones in parts that stay in the cache. Where torchao is not
installed the table says so, and only the bytes have a bar.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from shardkit.optim import AdamW8bit
from tests.bench.implementations import interleave
from tests.bench.sharded_optim import time_steps
from tests.bench.table import Bar, Row, Samples, compare
from tests.support.ranks import run_ranks
from tests.support.torchao import eager_adam

TITLE = "Step of AdamW8bit on one process"
SHAPES: Mapping[str, list[tuple[int, ...]]] = {
    "a GPT block of 512 channels": [(1536, 512), (512, 512), (2720, 512), (512, 1360), (512,), (512,)],
    "100 matrices of 64 x 64, 100 vectors": [(64, 64)] * 100 + [(64,)] * 100,
}
NUM_STEPS = 10
BYTES_CASE, MOST_BYTES = "state of 4 matrices of 1024 x 1024", 2.1
BARS = (Bar("shardkit", "step", 1.05, of="torchao"),)


def is_torchao_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def measure(num_launches: int) -> Mapping[str, Samples]:
    """Milliseconds a step, by case, and bytes a parameter, which do not vary."""
    names = ("torchao", "shardkit") if is_torchao_installed() else ("shardkit",)
    found: dict[str, Samples] = {
        case: interleave(names, num_launches, lambda name, c=case: run_ranks(time_case, 1, name, c)[0])  # type: ignore[misc]
        for case in SHAPES
    }
    return found | {BYTES_CASE: {"shardkit": {"state": [state_bytes_a_parameter()]}}}


def rows(samples: Mapping[str, Samples]) -> list[Row]:
    """The ratios, and the bytes."""
    table: list[Row] = []
    for case in SHAPES:
        absent = "" if "torchao" in samples[case] else " (torchao is not installed: no ratio)"
        table += compare(case + absent, samples[case], "ms", BARS)
    (num_bytes,) = samples[BYTES_CASE]["shardkit"]["state"]
    bar, unit = f"<= {MOST_BYTES} bytes a parameter", "bytes a parameter"
    return [
        *table,
        Row(BYTES_CASE, "shardkit", "state", num_bytes, unit, "", None, bar, num_bytes <= MOST_BYTES),
    ]


def time_case(rank: int, world_size: int, name: str, case: str) -> dict[str, float]:
    """The median step, in milliseconds."""
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES[case]]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer: Optimizer = AdamW8bit(params) if name == "shardkit" else eager_adam().AdamW8bit(params)
    return {"step": time_steps(optimizer.step, NUM_STEPS)}


def state_bytes_a_parameter() -> float:
    params = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(4)]
    states = [value for state in AdamW8bit(params).state.values() for value in state.values()]
    num_bytes = sum(value.numel() * value.element_size() for value in states)
    return num_bytes / sum(param.numel() for param in params)
