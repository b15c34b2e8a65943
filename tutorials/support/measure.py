"""What a training strategy costs a rank: bytes held between steps, bytes at the peak, steps a second.

On CUDA the allocator knows the peak. On CPUs `LiveBytes` counts the storages behind every tensor that an
operation touches; what a communication library allocates inside itself is not seen.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(frozen=True, slots=True)
class Cost:
    """One row of the table; bytes are those of the rank that holds most."""

    strategy: str
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    steps_per_s: float


def measure(
    strategy: str,
    build: Callable[[str], tuple[nn.Module, Optimizer]],
    step: Callable[[nn.Module, Optimizer, int], object],
    num_timed: int,
) -> Cost:
    """Build, count bytes over two steps, then time `num_timed`: all ranks must call.

    `step` takes the model, its optimizer and the step's number, waits for the device and keeps the gradients.
    """
    with LiveBytes() as live:
        model, optimizer = build(strategy)
        step(model, optimizer, 0)
        live.peak_bytes = 0
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, 1)
    params = list(model.parameters())
    grads = [param.grad for param in params]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else live.peak_bytes
    held = [held_bytes(params), held_bytes(grads), held_bytes(list(optimizer.state.values()))]
    most = torch.tensor([*held, peak], device=params[0].device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    params_bytes, grads_bytes, optimizer_bytes, peak_bytes = most.tolist()
    seconds = []
    for number in range(2, 2 + num_timed):
        start = time.perf_counter()
        step(model, optimizer, number)
        seconds.append(time.perf_counter() - start)
    return Cost(strategy, params_bytes, grads_bytes, optimizer_bytes, peak_bytes, 1 / median(seconds))


class LiveBytes(TorchDispatchMode):
    """The greatest number of bytes alive at once, in tensors touched since this mode was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for storage in local_storages((args, kwargs, result)):
            self.storages.add(storage)
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self.storages))
        return result


def held_bytes(tensors: object) -> int:
    """The bytes that this rank holds for the tensors of a nested structure, each storage counted once."""
    return sum(storage.nbytes() for storage in {s.data_ptr(): s for s in local_storages(tensors)}.values())


def local_storages(tensors: object) -> Iterator[torch.UntypedStorage]:
    """The storages behind the tensors of a nested structure; of a DTensor, this rank's."""
    for leaf in tree_iter(tensors):
        if isinstance(leaf, Tensor):
            yield local_of(leaf).untyped_storage()


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def table(costs: Iterable[Cost]) -> str:
    """The costs as aligned text, in MB (10**6 bytes) a rank."""
    titles = ("parameters", "gradients", "optimizer", "peak", "steps/s")
    lines = [f"{'strategy':12}" + "".join(f"{title:>12}" for title in titles)]
    for cost in costs:
        sizes = (cost.params_bytes, cost.grads_bytes, cost.optimizer_bytes, cost.peak_bytes)
        columns = [size / 1e6 for size in sizes] + [cost.steps_per_s]
        lines.append(f"{cost.strategy:12}" + "".join(f"{column:12.1f}" for column in columns))
    return "\n".join(lines)


def draw(costs: Sequence[Cost], curve_file: Path, title: str, picture: Path) -> str:
    """Draw the loss curve, if there is one, beside the costs; returns what was done, in words."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed (pip install shardkit[plot])"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    curve = json.loads(curve_file.read_text()) if curve_file.exists() else []
    left.plot([p["step"] for p in curve], [p["train"] for p in curve], color="0.75", label="training batch")
    seen = [p for p in curve if "held_out" in p]
    left.plot([p["step"] for p in seen], [p["held_out"] for p in seen], "o-", ms=3, label="held-out text")
    left.set(title="loss", xlabel="step", ylabel="bits a byte", ylim=(0, None))
    left.legend()

    bottom = [0.0] * len(costs)
    names = [f"{cost.strategy}\n{cost.steps_per_s:.1f} steps/s" for cost in costs]
    parts = {"parameters": "params_bytes", "gradients": "grads_bytes", "optimizer state": "optimizer_bytes"}
    for label, field in parts.items():
        heights = [getattr(cost, field) / 1e6 for cost in costs]
        right.bar(names, heights, 0.6, bottom=bottom, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    peaks = [cost.peak_bytes / 1e6 for cost in costs]
    right.scatter(names, peaks, marker="_", s=900, color="black", label="peak in a step")
    right.set(title=title, ylabel="MB a rank")
    right.legend(markerscale=0.4)
    figure.savefig(picture, dpi=120)
    return f"picture: {picture}"
