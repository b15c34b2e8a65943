"""Two optimizers train the demo's GPT from the same weights on the same batches; the lower loss wins.

The model is small enough for two cores to train it twice in some ten seconds. Each optimizer has the rate
that gave it, of those listed beside it, the lowest mean loss over two seeds in this very setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.progress import say
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from train_gpt import BETAS, CONTEXT, GPT, WEIGHT_DECAY, OptimizerName, Text, wish

from shardkit import fully_shard
from shardkit.optim import split_params

DIM, NUM_LAYERS, BATCH = 64, 2, 16
NUM_STEPS, NUM_WARM_UP = 150, 20
ADAMW_LR = 4e-3  # of 2e-3, 4e-3, 8e-3, 16e-3

Curve = dict[int, float]  # step -> bits a byte on held-out text


def race(name: str, algorithm: OptimizerName, make: Callable[[nn.Module], Optimizer]) -> tuple[float, float]:
    """Train with AdamW and with what `make` builds, draw both curves; returns both last losses.

    Collective: all ranks must call.

    Args:
        name: of the optimizer, and of the picture.
        algorithm: that the layout is made for.
        make: an optimizer over a sharded model.
    """
    curves = {"AdamW": train("adamw", _adamw), name: train(algorithm, make)}
    if dist.get_rank() == 0:
        for label, curve in curves.items():
            print(f"{label}: {curve[0]:.2f} -> {curve[NUM_STEPS]:.2f} bits a byte on held-out text")
        print(draw(curves, Path("runs") / f"{name.lower()}.png"), flush=True)
    return curves["AdamW"][NUM_STEPS], curves[name][NUM_STEPS]


def routed_groups(model: nn.Module, algorithm: OptimizerName) -> list[dict[str, Any]]:
    """The matrices inside the network for `algorithm`, the rest for AdamW; says how many and why."""
    groups = split_params(model, algorithm=algorithm)
    groups[-1]["betas"] = BETAS
    for group in groups:
        name, reason = group["params"][0][0], group["reasons"][0]
        say(f"{group['algorithm']}: {len(group['params'])} parameters, as {name}: {reason}")
    return groups


def train(algorithm: OptimizerName, make: Callable[[nn.Module], Optimizer]) -> Curve:
    """Train from the seed: all ranks must call."""
    torch.manual_seed(0)
    text, model = Text.load(torch.device("cpu")), GPT(DIM, NUM_LAYERS)
    for module in (*model.blocks, model):
        fully_shard(module, shard_placement_fn=lambda param: wish(param, algorithm))
    optimizer = make(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    curve = {0: held_out_bits(model, text, 64)}
    for step in range(NUM_STEPS):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / NUM_WARM_UP, 1.67 * (1 - step / NUM_STEPS))
        optimizer.zero_grad()
        _loss(model, text.batch(step, BATCH // dist.get_world_size())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 25 == 0:
            curve[step + 1] = held_out_bits(model, text, 512 if step + 1 == NUM_STEPS else 64)
    return curve


@torch.no_grad()
def held_out_bits(model: nn.Module, text: Text, num_sequences: int) -> float:
    """Bits a byte on the first held-out sequences, shared out over the ranks: all ranks must call."""
    world_size = dist.get_world_size()
    sequences = text.held_out.unfold(0, CONTEXT + 1, CONTEXT)[:num_sequences]
    mine = sequences[dist.get_rank() :: world_size]
    total = torch.stack([_loss(model, part) for part in mine.split(32)]).mean()
    dist.all_reduce(total)
    return total.item() / world_size / math.log(2)


def draw(curves: Mapping[str, Curve], picture: Path) -> str:
    """Draw the curves; returns what was done, in words."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed (pip install shardkit[plot])"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for label, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), "o-", ms=3, label=label)
    axes.set(title="held-out text", xlabel="step", ylabel="bits a byte", ylim=(0, None))
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    return f"picture: {picture}"


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=ADAMW_LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def _loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """The mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
