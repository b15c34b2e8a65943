"""What each sharding rule pads on one layer of real models at 8 to 1,024 ranks, and how long planning takes.

One layer is one unit, a shard is a multiple of 64 elements. "experts 16" puts the expert weights in blocks of
16 rows, counted over the rows of the whole stack as the published study does, and cuts the rest anywhere;
"all 16" puts every matrix in blocks of 16 rows. "shardkit-2" may send a layer in two buckets. "bound" is what
no order of the tensors can pad less than, at the size that pads most: the plans' own certificate.

Nothing is sent and nothing trained: the figures hold on any machine, but for the milliseconds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from shardkit import packing
from shardkit.plan import BucketPlan, TensorSpec, plan_buckets
from tests.bench.table import Row

TITLE = "Padding of a layer at 8 to 1,024 ranks, step 8, and planning time"

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


def shardkit_plans(specs: Sequence[TensorSpec], num_ranks: int, max_buckets: int) -> tuple[BucketPlan, ...]:
    return plan_buckets(
        specs, num_ranks, unit_numel=UNIT_NUMEL, max_padding=math.inf, max_buckets=max_buckets
    )


def shardkit_numel(specs: Sequence[TensorSpec], num_ranks: int, max_buckets: int) -> int:
    return num_ranks * sum(plan.shard_numel for plan in shardkit_plans(specs, num_ranks, max_buckets))


def bound_numel(specs: Sequence[TensorSpec], num_ranks: int, max_buckets: int) -> int:
    """What the plans prove that no order of these tensors in these buckets can be below."""
    return num_ranks * sum(plan.lower_bound_numel for plan in shardkit_plans(specs, num_ranks, max_buckets))


NumelAt = Callable[[int], int]  # of all shards together, by the number of ranks


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
    bound_percent: float | None  # at `max_at`


def padding_row(
    layer: Layer,
    labels: tuple[str, str, str],
    sizes: Sequence[int],
    numel_at: NumelAt,
    bound_at: NumelAt | None = None,
) -> PaddingRow:
    numel = sum(math.prod(shape) for shape in layer.values())
    percents = {num_ranks: 100 * (numel_at(num_ranks) / numel - 1) for num_ranks in sizes}
    max_at = max(percents, key=percents.__getitem__)
    num_above = sum(percent > 3 for percent in percents.values())
    mean = statistics.mean(percents.values())
    bound = None if bound_at is None else 100 * (bound_at(max_at) / numel - 1)
    return PaddingRow(*labels, mean, percents[max_at], max_at, num_above, len(sizes), bound)


RULES: dict[str, Callable[[Layer, int], int]] = {"fsdp2": fsdp2_numel, "megatron-fsdp": megatron_numel}
MAX_BUCKETS = {"shardkit": 1, "shardkit-2": 2}


def padding_rows(model: str, sizes: Sequence[int]) -> list[PaddingRow]:
    """What FSDP2, Megatron-FSDP and shardkit pad on one layer of the model."""
    layer = LAYERS[model]
    rows = [
        padding_row(layer, (model, "dim 0", rule), sizes, partial(numel_of, layer))
        for rule, numel_of in RULES.items()
    ]
    for blocks in BLOCKS:
        specs = tensor_specs(layer, *BLOCKS[blocks])
        if all(spec.block_numel == 1 for spec in specs):
            continue
        for rule, max_buckets in MAX_BUCKETS.items():
            rows.append(
                padding_row(
                    layer,
                    (model, blocks, rule),
                    sizes,
                    partial(shardkit_numel, specs, max_buckets=max_buckets),
                    partial(bound_numel, specs, max_buckets=max_buckets),
                )
            )
    return rows


def gpt_oss_experts_rows() -> list[PaddingRow]:
    """The expert weights alone at 256 ranks: twice as many ranks as experts."""
    specs = tensor_specs(GPT_OSS_EXPERTS, 1, 0)
    labels = ("GPT-OSS-120B experts", "256 ranks")
    return [
        *(
            padding_row(GPT_OSS_EXPERTS, (*labels, rule), [256], partial(numel_of, GPT_OSS_EXPERTS))
            for rule, numel_of in RULES.items()
        ),
        padding_row(
            GPT_OSS_EXPERTS, (*labels, "shardkit"), [256], partial(shardkit_numel, specs, max_buckets=1)
        ),
    ]


def preferred_row() -> PaddingRow:
    """Llama-3-70B where blocks of 16 rows are a preference: some fall to fewer rows to stay in the budget."""
    layer = LAYERS["Llama-3-70B"]
    specs = [replace(spec, required=False) for spec in tensor_specs(layer, *BLOCKS["all 16"])]

    def numel_at(num_ranks: int) -> int:
        plans = plan_buckets(
            specs, num_ranks, unit_numel=UNIT_NUMEL, max_padding=PREFERRED_MAX_PADDING, max_buckets=2
        )
        return num_ranks * sum(plan.shard_numel for plan in plans)

    return padding_row(layer, ("Llama-3-70B, preferred", "all 16", "shardkit-2"), ALL_SIZES, numel_at)


class TimeRow(NamedTuple):
    """How long planning takes without the shape cache, except where layers repeat."""

    blocks: str
    what: str
    milliseconds: float
    at_most: float


def planning_milliseconds(
    layers: Sequence[Sequence[TensorSpec]], num_ranks: int, max_buckets: int = 2, num_runs: int = 3
) -> float:
    """The median process time of runs that each start with an empty shape cache."""
    times = []
    for _ in range(num_runs):
        packing.pack.cache_clear()
        start = time.process_time()
        for specs in layers:
            shardkit_plans(specs, num_ranks, max_buckets)
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times)


def time_rows(num_runs: int) -> list[TimeRow]:
    """A DeepSeek-V3 layer of 781 tensors in up to two buckets, then all 61 layers of the model."""
    rows = []
    for blocks in BLOCKS:
        moe = tensor_specs(deepseek_moe_layer(), *BLOCKS[blocks])
        dense = tensor_specs(deepseek_dense_layer(), *BLOCKS[blocks])
        of_size = {num_ranks: planning_milliseconds([moe], num_ranks, 2, num_runs) for num_ranks in ALL_SIZES}
        slowest = max(of_size, key=of_size.__getitem__)
        rows.append(TimeRow(blocks, f"slowest, at {slowest}", of_size[slowest], LAYER_MILLISECONDS))
        many = planning_milliseconds([moe], 100_000, 2, num_runs)
        rows.append(TimeRow(blocks, "at 100,000", many, LAYER_MILLISECONDS))
        model = planning_milliseconds([dense] * 3 + [moe] * 58, 1024, 2, num_runs)
        rows.append(TimeRow(blocks, "61 layers, at 1024", model, MODEL_MILLISECONDS))
    return rows


PREFERRED_MAX_PADDING = 0.098
LAYER_MILLISECONDS, MODEL_MILLISECONDS = 25.0, 100.0
# (model, blocks, rule) -> the most that the greatest padding may be, in percent, over all sizes
MAX_PERCENT: dict[tuple[str, str, str], float] = {
    ("GPT-OSS-120B", "experts 1", "shardkit"): 0.17,
    ("GPT-OSS-120B", "experts 16", "shardkit"): 2.8,
    ("GPT-OSS-120B", "experts 128", "shardkit"): 18.96,
    ("DeepSeek-V3", "experts 1", "shardkit"): 0.12,
    ("DeepSeek-V3", "experts 16", "shardkit"): 1.8,
    ("DeepSeek-V3", "experts 128", "shardkit"): 7.3,
    # published for powers of two; where the blocks are required, the bound itself is above it at 48 sizes
    ("Llama-3-70B, powers of two", "all 16", "shardkit"): 9.8,
    ("Llama-3-70B, preferred", "all 16", "shardkit-2"): 9.8,
}
MAX_NUM_ABOVE_3_PERCENT = {("DeepSeek-V3", "experts 128", "shardkit-2"): 6}


class Measured(NamedTuple):
    padding: list[PaddingRow]
    times: list[TimeRow]


def measure(num_launches: int) -> Measured:
    """Padding does not vary; a planning time is the median of `num_launches`."""
    rows = [row for model in LAYERS for row in padding_rows(model, ALL_SIZES)]
    powers = padding_rows("Llama-3-70B", FAST_SIZES)
    rows += [row._replace(model="Llama-3-70B, powers of two") for row in powers if row.blocks == "all 16"]
    return Measured([*rows, preferred_row(), *gpt_oss_experts_rows()], time_rows(num_launches))


def rows(samples: Measured) -> list[Row]:
    table = [row for padding in samples.padding for row in _padding_table(padding)]
    for blocks, what, milliseconds, at_most in samples.times:
        case = f"planning a DeepSeek-V3 layer of 781 tensors, {blocks}"
        table.append(_row(case, "shardkit-2", what, milliseconds, "ms", at_most))
    return table


def _padding_table(padding: PaddingRow) -> list[Row]:
    case = f"{padding.model}, {padding.blocks}"
    key = padding[:3]
    at = "" if padding.num_sizes == 1 else f"most, at {padding.max_at}"
    table = [_row(case, padding.rule, at or "padding", padding.max_percent, "%", MAX_PERCENT.get(key))]
    if padding.bound_percent is not None:
        table.append(_row(case, padding.rule, f"bound, at {padding.max_at}", padding.bound_percent, "%"))
    if padding.num_sizes > 1:
        table.append(_row(case, padding.rule, "mean", padding.mean_percent, "%"))
    if (at_most := MAX_NUM_ABOVE_3_PERCENT.get(key)) is not None:
        num_above, unit = padding.num_above_3_percent, f"of {padding.num_sizes} sizes"
        table.append(_row(case, padding.rule, "above 3 %", num_above, unit, at_most))
    return table


def _row(case: str, rule: str, quantity: str, value: float, unit: str, at_most: float | None = None) -> Row:
    """A line whose bar is a number and no ratio; published percentages are rounded to two digits."""
    bar = "" if at_most is None else f"<= {at_most:g} {unit}"
    met = None if at_most is None else round(value, 2) <= at_most
    return Row(case, rule, quantity, value, unit, "", None, bar, met)
