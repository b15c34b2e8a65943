"""What a model plan says is what happens: bytes alive and bytes sent, over layouts, dtypes and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit import Blocks, MixedPrecisionPolicy, fully_shard, model_plan, predicted_peak_bytes
from shardkit.collectives import count_traffic
from tests.bench.peak import LiveBytes
from tests.support.models import Transformer
from tests.support.ranks import run_ranks

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FLOAT32_REDUCE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build() -> Transformer:
    """Blocks of 0.8 M parameters between an embedding and a head of half as many in the root."""
    return Transformer(vocab=1536, dim=256, num_layers=3)


def shard_each(model: Transformer, mesh: DeviceMesh, **options: object) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh, **options)


def freeze_half(model: Transformer, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        block.qkv.requires_grad_(False)
        block.up.requires_grad_(False)
    shard_each(model, mesh)


def shard_nested(model: Transformer, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block.up, mesh)
    shard_each(model, mesh)


def reshard_to_half(model: Transformer, mesh: DeviceMesh) -> None:
    """Pieces of two ranks' rows, where the ranks divide."""
    shard_each(model, mesh, reshard_after_forward=2 if mesh["shard"].size() == 4 else True)


def reduce_two_at_once(model: Transformer, mesh: DeviceMesh) -> None:
    shard_each(model, mesh)
    model.set_reduce_scatter_max_input_buffers(2)


def shard_whole(model: Transformer, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh)


Way = Callable[[Transformer, DeviceMesh], None]
WAYS: dict[str, Way] = {
    "Shard(0)": shard_each,
    "ragged": lambda model, mesh: shard_each(model, mesh, shard_placement_fn=lambda param: Blocks()),
    "no reshard": lambda model, mesh: shard_each(model, mesh, reshard_after_forward=False),
    "root too": lambda model, mesh: shard_each(model, mesh, reshard_after_forward=True),
    "reshard to a half": reshard_to_half,
    "two reductions": reduce_two_at_once,
    "bfloat16": lambda model, mesh: shard_each(model, mesh, mp_policy=BFLOAT16),
    "bfloat16, float32 reduce": lambda model, mesh: shard_each(model, mesh, mp_policy=FLOAT32_REDUCE),
    "frozen": freeze_half,
    "nested": shard_nested,
    "one unit": shard_whole,
}


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, 1), (4, 2), (4, 4)])
def test_a_step_holds_and_sends_what_the_plan_says(world_size: int, shard_size: int) -> None:
    def check(rank: int, world_size: int) -> None:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (world_size // shard_size, shard_size), mesh_dim_names=names)
        for name, way in WAYS.items():
            model = build()
            way(model, mesh)
            buckets = [bucket for unit in model_plan(model).units for bucket in unit.buckets]
            predicted = sum(bucket.gather_bytes for bucket in buckets)
            reduced = sum(bucket.reduce_bytes for bucket in buckets)
            peak_bytes, sent_bytes = measure(model)
            assert sent_bytes["all_gather"] == predicted, name
            assert sent_bytes["reduce_scatter"] + sent_bytes["all_reduce"] == reduced, name
            assert 0.98 <= peak_bytes / predicted_peak_bytes(model) <= 1.02, name

    run_ranks(check, world_size, timeout=110)


def measure(model: Transformer) -> tuple[int, Counter[str]]:
    """The peak of live bytes, and the bytes sent by kind, in a step of two tokens after the first one.

    The lower peak of two steps: gloo's threads may hold on for a moment to what they have reduced.
    """
    tokens = torch.tensor([[1, 2]])
    peaks = []
    for _ in range(3):
        with LiveBytes() as live, count_traffic() as traffic:
            model(tokens).sum().backward()
        model.zero_grad()
        peaks.append(live.peak_bytes)
    return min(peaks[1:]), traffic.sent_bytes
