"""The planner on real layers: padding against the published study, and planning time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.bench import padding


@pytest.mark.parametrize(
    ("model", "blocks", "max_percent"),
    [
        ("GPT-OSS-120B", "experts 1", 0.17),
        ("GPT-OSS-120B", "experts 16", 2.80),
        ("GPT-OSS-120B", "experts 128", 18.96),
        ("DeepSeek-V3", "experts 1", 0.12),
        ("DeepSeek-V3", "experts 16", 1.80),
    ],
)
def test_padding_of_one_bucket_is_at_most_the_published(model: str, blocks: str, max_percent: float) -> None:
    sizes = [*padding.FAST_SIZES, 864, 952, 976, 1000, 1016]
    assert padding_percent(model, blocks, sizes, max_buckets=1).max_percent <= max_percent + 0.005


def test_padding_of_deepseek_in_blocks_of_128_rows_at_all_sizes() -> None:
    one = padding_percent("DeepSeek-V3", "experts 128", padding.ALL_SIZES, max_buckets=1)
    two = padding_percent("DeepSeek-V3", "experts 128", padding.ALL_SIZES, max_buckets=2)
    assert one.max_percent <= 7.3
    assert two.num_above_3_percent <= 6
    assert two.mean_percent <= one.mean_percent


def test_padding_of_llama_in_blocks_of_16_rows_at_powers_of_two() -> None:
    assert padding_percent("Llama-3-70B", "all 16", padding.FAST_SIZES, max_buckets=1).max_percent <= 9.805


def test_preferred_blocks_of_16_rows_pad_llama_within_the_budget_at_all_sizes() -> None:
    assert padding.preferred_row().max_percent <= 9.805


def padding_percent(model: str, blocks: str, sizes: Sequence[int], max_buckets: int) -> padding.PaddingRow:
    layer = padding.LAYERS[model]
    specs = padding.tensor_specs(layer, *padding.BLOCKS[blocks])
    return padding.padding_row(
        layer, (model, blocks, ""), sizes, lambda m: padding.shardkit_numel(specs, m, max_buckets)
    )


def test_bench_rows_compare_the_three_rules() -> None:
    rows = padding.padding_rows("GPT-OSS-120B", padding.FAST_SIZES)
    assert {row.rule for row in rows} == {"fsdp2", "megatron-fsdp", "shardkit", "shardkit-2"}
    assert all(row.num_sizes == 8 and row.mean_percent <= row.max_percent for row in rows)


def test_padding_of_the_other_rules_is_as_published() -> None:
    numel = sum(math.prod(shape) for shape in padding.GPT_OSS_EXPERTS.values())
    assert padding.fsdp2_numel(padding.GPT_OSS_EXPERTS, 256) / numel == 2.0
    assert round(padding.megatron_numel(padding.GPT_OSS_EXPERTS, 256) / numel, 3) == 1.333


@pytest.mark.parametrize("num_ranks", [64, 1024, 100_000])
@pytest.mark.parametrize("blocks", ["experts 1", "experts 128", "all 16"])
def test_planning_a_layer_of_781_tensors_takes_25_ms_at_any_size(blocks: str, num_ranks: int) -> None:
    specs = padding.tensor_specs(padding.deepseek_moe_layer(), *padding.BLOCKS[blocks])
    assert len(specs) == 781
    assert padding.planning_milliseconds([specs], num_ranks, max_buckets=1) <= 25


def test_planning_61_layers_takes_100_ms() -> None:
    moe = padding.tensor_specs(padding.deepseek_moe_layer(), 1, 1)
    dense = padding.tensor_specs(padding.deepseek_dense_layer(), 1, 1)
    assert padding.planning_milliseconds([dense] * 3 + [moe] * 58, 1024) <= 100


def test_a_bench_row_is_held_to_the_published_figure_and_shows_the_bound() -> None:
    row = padding.PaddingRow("GPT-OSS-120B", "experts 16", "shardkit", 0.7, 2.804, 1024, 0, 128, 2.804)
    samples = padding.Measured([row, row._replace(max_percent=2.806)], [])
    most, bound, mean, *worse = padding.rows(samples)
    assert (most.quantity, most.bar, most.met) == ("most, at 1024", "<= 2.8 %", True)
    assert (bound.value, bound.met) == (2.804, None)
    assert mean.value == 0.7
    assert worse[0].met is False


def test_a_bench_row_of_a_slow_plan_misses_its_bar() -> None:
    times = [padding.TimeRow("all 1", "slowest, at 976", ms, 25.0) for ms in (24.9, 25.1)]
    assert [row.met for row in padding.rows(padding.Measured([], times))] == [True, False]


def test_every_published_figure_has_its_row_in_the_bench() -> None:
    layers = {*padding.LAYERS, "Llama-3-70B, powers of two", "Llama-3-70B, preferred"}
    rules = {*padding.RULES, *padding.MAX_BUCKETS}
    for model, blocks, rule in (*padding.MAX_PERCENT, *padding.MAX_NUM_ABOVE_3_PERCENT):
        assert model in layers and blocks in padding.BLOCKS and rule in rules
