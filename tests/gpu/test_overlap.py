"""Gathers run beside the computation, as the profiler sees it.

On one rank a gather is a copy on the all-gather stream. Each layer computes for milliseconds and is copied in
a fraction of one, so every gather but the first of a forward, and the first two of a backward, which the host
starts together before it starts any computation, hides behind a layer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from shardkit import fully_shard
from tests.gpu.one_gpu import needs_gpu, run_on_gpu

pytestmark = [needs_gpu, pytest.mark.filterwarnings("ignore")]  # the profiler's own

DIM, NUM_LAYERS, NUM_ROWS = 4096, 6, 16384


class Span(NamedTuple):
    """A kernel or copy on the GPU, in microseconds."""

    stream: int
    start: float
    end: float


def spans_of(run: Callable[[], object]) -> list[Span]:
    """What the GPU does for `run`."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    return [Span(event["args"]["stream"], event["ts"], event["ts"] + event["dur"]) for event in on_gpu]


def by_stream(spans: list[Span]) -> list[list[Span]]:
    """The spans of each stream, the busiest stream first."""
    streams: dict[int, list[Span]] = {}
    for span in spans:
        streams.setdefault(span.stream, []).append(span)
    return sorted(streams.values(), key=lambda of_one: -sum(span.end - span.start for span in of_one))


def num_hidden(gathers: list[Span], computation: list[Span]) -> int:
    """How many gathers share some time with a kernel of the computation."""
    return sum(any(c.start < g.end and g.start < c.end for c in computation) for g in gathers)


def profile_step() -> tuple[int, int, int, int]:
    """Gathers, and hidden ones, of a forward; then of its backward."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(NUM_LAYERS))).cuda()
    x, mesh = torch.randn(NUM_ROWS, DIM, device="cuda"), init_device_mesh("cuda", (1,))
    for module in (*model, model):
        fully_shard(module, mesh)
    model(x).sum().backward()  # what happens once is over
    model.zero_grad()  # gradients that are added to would keep another stream busier than gathers do
    losses: list[torch.Tensor] = []
    counts: list[int] = []
    for run in (lambda: losses.append(model(x).sum()), lambda: losses[0].backward()):
        computation, gathers, *_ = by_stream(spans_of(run))
        counts += [len(gathers), num_hidden(gathers, computation)]
    return counts[0], counts[1], counts[2], counts[3]


def test_gathers_hide_behind_layers_in_forward_and_backward() -> None:
    in_forward, hidden_in_forward, in_backward, hidden_in_backward = run_on_gpu(profile_step)
    assert in_forward == NUM_LAYERS and hidden_in_forward >= NUM_LAYERS - 1
    assert in_backward == NUM_LAYERS and hidden_in_backward >= NUM_LAYERS - 2
