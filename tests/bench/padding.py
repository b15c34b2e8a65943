"""What each sharding rule pads on real models at 8 to 1,024 ranks, and how long planning takes.

    python -m tests.bench.padding            128 sizes
    python -m tests.bench.padding --fast     powers of two

One layer is one unit, a shard is a multiple of 64 elements. "experts 16" puts the expert weights in blocks of
16 rows, counted over the rows of the whole stack as the published study does, and cuts the rest anywhere;
"all 16" puts every matrix in blocks of 16 rows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from shardkit import packing
from shardkit.plan import TensorSpec, plan_buckets

Layer = dict[str, tuple[int, ...]]

ALL_SIZES = range(8, 1025, 8)
FAST_SIZES = tuple(2**i for i in range(3, 11))
UNIT_NUMEL = 64


def llama_layer(dim: int, num_heads: int, num_kv_heads: int, hidden_dim: int) -> Layer:
    kv_dim = dim // num_heads * num_kv_heads
    return {
        "attn_norm": (dim,),
        "q": (dim, dim),
        "k": (kv_dim, dim),
        "v": (kv_dim, dim),
        "o": (dim, dim),
        "mlp_norm": (dim,),
        "gate": (hidden_dim, dim),
        "up": (hidden_dim, dim),
        "down": (dim, hidden_dim),
    }


def gpt_oss_layer(
    dim: int = 2880, num_heads: int = 64, num_kv_heads: int = 8, head_dim: int = 64, num_experts: int = 128
) -> Layer:
    """GPT-OSS-120B; the experts are one fused stack."""
    q_dim, kv_dim = num_heads * head_dim, num_kv_heads * head_dim
    return {
        "attn_norm": (dim,),
        "q": (q_dim, dim),
        "q_bias": (q_dim,),
        "k": (kv_dim, dim),
        "k_bias": (kv_dim,),
        "v": (kv_dim, dim),
        "v_bias": (kv_dim,),
        "o": (dim, q_dim),
        "o_bias": (dim,),
        "sinks": (num_heads,),
        "mlp_norm": (dim,),
        "router": (num_experts, dim),
        "router_bias": (num_experts,),
        "experts.gate_up": (num_experts, dim, 2 * dim),
        "experts.gate_up_bias": (num_experts, 2 * dim),
        "experts.down": (num_experts, dim, dim),
        "experts.down_bias": (num_experts, dim),
    }


def deepseek_attention(
    dim: int = 7168, num_heads: int = 128, q_rank: int = 1536, kv_rank: int = 512
) -> Layer:
    """DeepSeek-V3's latent attention: per head 128 numbers without position, 64 with, and 128 of value."""
    return {
        "attn_norm": (dim,),
        "q_a": (q_rank, dim),
        "q_a_norm": (q_rank,),
        "q_b": (num_heads * (128 + 64), q_rank),
        "kv_a": (kv_rank + 64, dim),
        "kv_a_norm": (kv_rank,),
        "kv_b": (num_heads * (128 + 128), kv_rank),
        "o": (dim, num_heads * 128),
        "mlp_norm": (dim,),
    }


def deepseek_dense_layer(dim: int = 7168, hidden_dim: int = 18432) -> Layer:
    mlp: Layer = {"gate": (hidden_dim, dim), "up": (hidden_dim, dim), "down": (dim, hidden_dim)}
    return deepseek_attention(dim) | mlp


def deepseek_moe_layer(dim: int = 7168, hidden_dim: int = 2048, num_experts: int = 256) -> Layer:
    """DeepSeek-V3; each expert has its own three matrices."""
    layer = deepseek_attention(dim) | {"gate": (num_experts, dim)}
    for expert in [f"experts.{i}" for i in range(num_experts)] + ["shared"]:
        layer[f"{expert}.gate"] = (hidden_dim, dim)
        layer[f"{expert}.up"] = (hidden_dim, dim)
        layer[f"{expert}.down"] = (dim, hidden_dim)
    return layer


LAYERS: dict[str, Layer] = {
    "GPT-OSS-120B": gpt_oss_layer(),
    "DeepSeek-V3": deepseek_moe_layer(),
    "Llama-3-70B": llama_layer(8192, 64, 8, 28672),
}
BLOCKS = {  # name -> rows a block of the experts, and of the other matrices; 0 cuts anywhere
    "experts 1": (1, 0),
    "experts 16": (16, 0),
    "experts 128": (128, 0),
    "all 1": (1, 1),
    "all 16": (16, 16),
}
GPT_OSS_EXPERTS: Layer = {name: shape for name, shape in gpt_oss_layer().items() if "experts" in name}


def fsdp2_numel(layer: Layer, num_ranks: int) -> int:
    """FSDP2 pads each parameter's first dim to a multiple of the ranks."""
    return sum(math.ceil(shape[0] / num_ranks) * num_ranks * math.prod(shape[1:]) for shape in layer.values())


def megatron_numel(layer: Layer, num_ranks: int) -> int:
    """Megatron-FSDP makes shards of whole rows for every parameter at once: a multiple of all row sizes."""
    row_numel = math.lcm(*(math.prod(shape[1:]) for shape in layer.values()))
    numel = sum(math.prod(shape) for shape in layer.values())
    return math.ceil(numel / (row_numel * num_ranks)) * row_numel * num_ranks


def tensor_specs(layer: Layer, expert_rows: int, other_rows: int) -> list[TensorSpec]:
    """The layer's matrices in blocks of so many rows; 0 rows, vectors and biases may be cut anywhere."""

    def spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
        num_rows = expert_rows if name.startswith("experts.") else other_rows
        if num_rows == 0 or len(shape) == 1 or name.endswith("bias"):
            return TensorSpec(name, math.prod(shape))
        return TensorSpec(name, math.prod(shape), num_rows * shape[-1], row_numel=shape[-1])

    return [spec(name, shape) for name, shape in layer.items()]


def shardkit_numel(specs: Sequence[TensorSpec], num_ranks: int, max_buckets: int) -> int:
    plans = plan_buckets(
        specs, num_ranks, unit_numel=UNIT_NUMEL, max_padding=math.inf, max_buckets=max_buckets
    )
    return num_ranks * sum(plan.shard_numel for plan in plans)


class PaddingRow(NamedTuple):
    """The padding of one rule on one layer over a range of sizes, in percent."""

    model: str
    blocks: str
    rule: str
    mean_percent: float
    max_percent: float
    max_at: int
    num_above_3_percent: int
    num_sizes: int


def padding_row(
    layer: Layer, labels: tuple[str, str, str], sizes: Sequence[int], numel_at: Callable[[int], int]
) -> PaddingRow:
    numel = sum(math.prod(shape) for shape in layer.values())
    percents = {num_ranks: 100 * (numel_at(num_ranks) / numel - 1) for num_ranks in sizes}
    max_at = max(percents, key=percents.__getitem__)
    num_above = sum(percent > 3 for percent in percents.values())
    mean = statistics.mean(percents.values())
    return PaddingRow(*labels, mean, percents[max_at], max_at, num_above, len(sizes))


def padding_rows(model: str, sizes: Sequence[int]) -> list[PaddingRow]:
    """What FSDP2, Megatron-FSDP and shardkit pad on one layer of the model."""
    layer = LAYERS[model]
    rows = [
        padding_row(layer, (model, "dim 0", "FSDP2"), sizes, partial(fsdp2_numel, layer)),
        padding_row(layer, (model, "dim 0", "Megatron-FSDP"), sizes, partial(megatron_numel, layer)),
    ]
    for blocks, (expert_rows, other_rows) in BLOCKS.items():
        specs = tensor_specs(layer, expert_rows, other_rows)
        if all(spec.block_numel == 1 for spec in specs):
            continue
        for max_buckets, rule in ((1, "shardkit"), (2, "shardkit, <= 2 buckets")):
            numel_at = partial(shardkit_numel, specs, max_buckets=max_buckets)
            rows.append(padding_row(layer, (model, blocks, rule), sizes, numel_at))
    return rows


class TimeRow(NamedTuple):
    """How long planning takes without the shape cache, except where layers repeat."""

    what: str
    num_ranks: int
    milliseconds: float


def planning_milliseconds(
    layers: Sequence[Sequence[TensorSpec]], num_ranks: int, max_buckets: int = 2
) -> float:
    """The median process time of three runs that each start with an empty shape cache."""
    times = []
    for _ in range(3):
        packing.pack.cache_clear()
        start = time.process_time()
        for specs in layers:
            shardkit_numel(specs, num_ranks, max_buckets)
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times)


def time_rows() -> list[TimeRow]:
    """A DeepSeek-V3 layer of 781 tensors at several sizes, then all 61 layers of the model."""
    rows = []
    for blocks, (expert_rows, other_rows) in BLOCKS.items():
        moe = tensor_specs(deepseek_moe_layer(), expert_rows, other_rows)
        dense = tensor_specs(deepseek_dense_layer(), expert_rows, other_rows)
        for num_ranks in (64, 1024, 100_000):
            what = f"one DeepSeek-V3 layer, {blocks}"
            rows.append(TimeRow(what, num_ranks, planning_milliseconds([moe], num_ranks)))
        what = f"61 DeepSeek-V3 layers, {blocks}"
        rows.append(TimeRow(what, 1024, planning_milliseconds([dense] * 3 + [moe] * 58, 1024)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="powers of two only")
    sizes = FAST_SIZES if parser.parse_args().fast else ALL_SIZES
    print(f"padding in percent over {len(sizes)} sizes from {sizes[0]} to {sizes[-1]}")
    print(f"{'model':14}{'blocks':13}{'rule':24}{'mean':>8}{'max':>9}{'at':>6}{'above 3 %':>11}")
    for model in LAYERS:
        for row in padding_rows(model, sizes):
            print(
                f"{row.model:14}{row.blocks:13}{row.rule:24}{row.mean_percent:8.2f}{row.max_percent:9.2f}"
                f"{row.max_at:6}{row.num_above_3_percent:11}"
            )
    for name, numel_at in (("FSDP2", fsdp2_numel), ("Megatron-FSDP", megatron_numel)):
        row = padding_row(GPT_OSS_EXPERTS, ("", "", name), [256], partial(numel_at, GPT_OSS_EXPERTS))
        print(f"GPT-OSS experts alone at 256 ranks, {name}: {row.max_percent:+.1f} %")
    print("planning time, median of 3, process time")
    for time_row in time_rows():
        print(f"{time_row.what:40}{time_row.num_ranks:8} ranks{time_row.milliseconds:9.1f} ms")


if __name__ == "__main__":
    main()
