"""The benchmark's arithmetic, on made-up samples: ratios within a round, bars, the mark of a miss."""

from __future__ import annotations

import json

import pytest
import torch

from tests.bench import eightbit, host, step, traffic
from tests.bench.implementations import interleave
from tests.bench.peak import LiveBytes
from tests.bench.table import Bar, Samples, as_json, compare, print_table

SAMPLES: Samples = {
    "fsdp2": {"step": [10.0, 20.0, 30.0]},
    "shardkit": {"step": [7.0, 14.0, 27.0]},
    "shardkit-ragged": {"step": [6.0, 16.0, 24.0]},
}


def test_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    _, shardkit, _ = compare("2 ranks", SAMPLES, "ms", [])
    assert shardkit.value == 14.0
    assert shardkit.ratio == pytest.approx(0.7)
    assert shardkit.met is None


@pytest.mark.parametrize(("at_most", "met"), [(0.71, True), (0.69, False)])
def test_a_bar_is_met_up_to_its_ratio(at_most: float, met: bool) -> None:
    _, shardkit, _ = compare("2 ranks", SAMPLES, "ms", [Bar("shardkit", "step", at_most)])
    assert shardkit.met is met


def test_a_bar_may_bound_from_below_too() -> None:
    bar = Bar("shardkit", "step", 1.05, at_least=0.95)
    _, shardkit, _ = compare("2 ranks", SAMPLES, "ms", [bar])
    assert (shardkit.met, shardkit.bar) == (False, "0.95 to 1.05x fsdp2")


def test_a_bar_against_another_implementation_has_its_own_row() -> None:
    bars = [Bar("shardkit-ragged", "step", 0.9), Bar("shardkit-ragged", "step", 1.05, of="shardkit")]
    rows = compare("2 ranks", SAMPLES, "ms", bars)[-2:]
    assert [(row.of, row.ratio) for row in rows] == [
        ("fsdp2", pytest.approx(0.8)),
        ("shardkit", pytest.approx(24 / 27)),
    ]
    assert all(row.met for row in rows)


def test_an_absent_reference_decides_nothing() -> None:
    samples: Samples = {"shardkit": {"step": [1.0]}}
    (row,) = compare("2 ranks", samples, "ms", [Bar("shardkit", "step", 0.5)])
    assert (row.ratio, row.met) == (None, None)


def test_a_miss_is_printed_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compare("2 ranks", SAMPLES, "ms", [Bar("shardkit", "step", 0.5)])
    print_table("Step", rows)
    printed = capsys.readouterr().out
    assert "0.70x fsdp2        <= 0.50x fsdp2: MISS" in printed
    assert json.loads(json.dumps(as_json(rows)))[1]["met"] is False


def test_every_round_starts_with_another_implementation() -> None:
    order: list[str] = []

    def launch(name: str) -> dict[str, float]:
        order.append(name)
        return {"step": float(len(order))}

    samples = interleave(["a", "b", "c"], 3, launch)
    assert "".join(order) == "abcbcacab"
    assert samples["b"]["step"] == [2.0, 4.0, 9.0]


def test_host_time_is_what_the_bare_model_does_not_take() -> None:
    times = {"bare": 0.5, "fsdp2": 1.5, "shardkit": 0.8}
    samples = {name: {host.QUANTITY: [ms]} for name, ms in times.items()}
    fsdp2, shardkit = host.rows(samples)
    assert (fsdp2.value, shardkit.ratio, shardkit.met) == (1.0, pytest.approx(0.3), True)


def test_step_rows_are_told_apart_by_world_size() -> None:
    rows = step.rows({2: SAMPLES, 4: SAMPLES})
    assert [row.case for row in rows] == ["2 ranks"] * 3 + ["4 ranks"] * 3


def test_live_bytes_follow_storages_as_they_grow_shrink_and_go() -> None:
    with LiveBytes() as live:
        kept = torch.ones(100)  # 400 bytes
        freed = kept * 2
        view = freed[50:]
        assert live.peak_bytes == 800
        del freed, view
        kept.untyped_storage().resize_(4000)
        live.peak_bytes = 0
        kept.sum()
    assert live.peak_bytes == 4004


def test_live_bytes_count_what_two_storages_share_once_and_meta_never() -> None:
    with LiveBytes() as live:
        kept = torch.ones(100)  # 400 bytes
        alias = torch.from_dlpack(kept[50:])
        assert alias.untyped_storage() is not kept.untyped_storage()
        alias.add_(1.0)
        torch.empty(1000, device="meta")
    assert live.peak_bytes == 400


def test_traffic_without_reshard_is_ddps_and_with_it_half_as_much_again() -> None:
    param_bytes = 6 * 4 * (2 * 256 * 1024 + 1024 + 256)
    kept, resharded = traffic.theory(False), traffic.theory(True)
    assert kept["sent"] * 2**20 == 2 * param_bytes * 3 / 4
    assert resharded["sent"] == 1.5 * kept["sent"]
    assert (kept["all-gathers"], resharded["all-gathers"]) == (1, 2)


def test_a_collective_too_many_misses_its_bar() -> None:
    exact = traffic.listed(traffic.theory(True))
    samples = {"shardkit": exact, "shardkit-ragged": exact | {"all-gathers": [13 / 6]}}
    missed = [row for row in traffic.rows({True: samples}) if row.met is False]
    assert [(row.implementation, row.quantity) for row in missed] == [("shardkit-ragged", "all-gathers")]


def test_a_bar_of_another_reference_needs_no_row_beside_it() -> None:
    samples: Samples = {"torchao": {"step": [2.0, 4.0]}, "shardkit": {"step": [1.0, 3.0]}}
    rows = compare("case", samples, "ms", [Bar("shardkit", "step", 1.05, of="torchao")])
    assert [(row.implementation, row.ratio, row.met) for row in rows] == [
        ("torchao", None, None),
        ("shardkit", 0.625, True),
    ]


def test_an_oracle_that_is_not_installed_is_said_to_be_missing() -> None:
    ours: Samples = {"shardkit": {"step": [1.0]}}
    both: Samples = ours | {"torchao": {"step": [0.5]}}
    num_bytes: Samples = {"shardkit": {"state": [2.2]}}
    without, with_it = (
        eightbit.rows({case: samples for case in eightbit.SHAPES} | {eightbit.BYTES_CASE: num_bytes})
        for samples in (ours, both)
    )
    assert all("torchao is not installed" in row.case for row in without[:-1])
    assert [row.met for row in without] == [None, None, False]
    assert [row.met for row in with_it if row.implementation == "shardkit"] == [False, False, False]
