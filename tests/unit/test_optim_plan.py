"""The optimizers' plans: pieces, owners, bytes; for models and world sizes that no machine here has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardkit.boxes import Layout
from shardkit.optim import Muon, block_for, muon_plan, ragged_layouts, route_params
from shardkit.optim.messages import schedule_of
from shardkit.optim.pieces import Region, matrices_of, row_layout, shares_of
from shardkit.optim.planning import Placing, fill_buckets
from shardkit.placement import Blocks, RaggedShard

LLAMA = [
    ("q", (4096, 4096)),
    ("k", (1024, 4096)),
    ("v", (1024, 4096)),
    ("o", (4096, 4096)),
    ("gate", (14336, 4096)),
    ("up", (14336, 4096)),
    ("down", (4096, 14336)),
]
ATTENTION = [("q", (3072, 2048)), ("kv_a", (576, 2048)), ("kv_b", (4096, 512)), ("o", (2048, 2048))]
DENSE = [*ATTENTION, ("gate", (11264, 2048)), ("up", (11264, 2048)), ("down", (2048, 11264))]
EXPERTS = [
    (f"{name}.{expert}", shape)
    for expert in range(64)
    for name, shape in (("gate", (1408, 2048)), ("up", (1408, 2048)), ("down", (2048, 1408)))
]
SHARED = [("gate", (2816, 2048)), ("up", (2816, 2048)), ("down", (2048, 2816)), ("router", (64, 2048))]
MODELS = {"llama": [LLAMA] * 32, "moe": [DENSE, *[[*ATTENTION, *SHARED, *EXPERTS]] * 26]}


def units_of(model: str, layers_per_unit: int) -> list[dict[str, tuple[int, ...]]]:
    layers = MODELS[model]
    return [
        {
            f"{i}.{name}": shape
            for i in range(start, min(start + layers_per_unit, len(layers)))
            for name, shape in layers[i]
        }
        for start in range(0, len(layers), layers_per_unit)
    ]


# GB that a rank sends in the mean, GB in and out of the busiest rank one way, busiest over mean FLOPs; of
# shards cut between any two elements, as they were counted by a model of the same rule apart from this code
COUNTED = """
                 8 ranks                64 ranks               512 ranks
    llama  1     1.64   2.42  1.06      .393   .426  1.06      .0538  .143  4.23
    llama  4     .134   .134  1.06      .308   .377  1.09      .0515  .138  4.23
    llama  8     0      0     1.00      .206   .302  1.06      .0487  .131  4.23
    llama  32    0      0     1.00      .0168  .017  1.06      .0354  .090  4.23
    moe    1     .167   .372  1.10      .107   .312  1.10      .0793  .112  1.10
    moe    4     .0174  .021  1.03      .0309  .123  1.10      .0294  .092  1.09
    moe    27    .0026  .004  1.01      .0029  .007  1.09      .0058  .043  1.10
"""
ROWS = [line.split() for line in COUNTED.strip().splitlines()[1:]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]} layers a unit")
def test_bytes_and_balance_of_large_models(row: list[str]) -> None:
    """Of 224 matrices and of 5,207, one, four, eight layers a unit, and all in one."""
    model, layers_per_unit, *counted = row
    for i, num_ranks in enumerate((8, 64, 512)):
        layouts = ragged_layouts(units_of(model, int(layers_per_unit)), num_ranks, Blocks.elements())
        found = muon_plan(layouts).balance
        figures = (found.mean_sent_bytes / 1e9, found.worst_bytes / 2e9, found.max_over_mean_flops)
        for figure, text in zip(figures, counted[3 * i : 3 * i + 3], strict=True):
            last_digit = 10.0 ** -len(text.partition(".")[2])
            assert abs(figure - float(text)) <= 0.5001 * last_digit, (num_ranks, figure, text)


@pytest.mark.parametrize("layers_per_unit", [1, 4, 32])
def test_shards_of_whole_rows_move_at_most_4_percent_more_than_element_cuts(layers_per_unit: int) -> None:
    units = units_of("llama", layers_per_unit)
    for num_ranks in (8, 64, 512):
        rows, elements = (
            muon_plan(ragged_layouts(units, num_ranks, blocks)).balance
            for blocks in (Blocks(), Blocks.elements())
        )
        assert rows.mean_sent_bytes <= 1.04 * elements.mean_sent_bytes
        assert rows.max_over_mean_flops == pytest.approx(elements.max_over_mean_flops, abs=0.005)


def ragged(shape: tuple[int, ...], rows: tuple[int, ...]) -> Layout:
    return Layout(shape, (len(rows),), (RaggedShard((0,), rows),))


def test_a_plan_prints_as_a_table() -> None:
    layouts = {
        "a": ragged((6, 4), (6, 0, 0)),
        "b": ragged((300, 200), (1, 299, 0)),
        "c": ragged((2, 8), (1, 1, 0)),
    }
    assert str(muon_plan(layouts)).splitlines() == [
        "piece           matrix  mode          rank       moved      FLOPs",
        "a                6 x 4  local            0         0 B   2.56e+03",
        "b            300 x 200  owner            1       800 B   3.20e+08",
        "c                2 x 8  replicate      0,1        32 B   7.20e+02",
        "3 ranks: each sends 277 B in the mean; the busiest sends and receives 832 B; 3.20e+08 FLOPs, "
        "busiest over mean 3.00",
    ]


def test_the_digest_follows_every_layout() -> None:
    plans = [muon_plan({"w": ragged((8, 4), rows)}) for rows in ((4, 4), (4, 4), (3, 5))]
    assert plans[0].digest == plans[1].digest != plans[2].digest


def test_what_must_be_local_and_is_cut_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"param 'w': expected on one rank.*Blocks\.whole\(\)"):
        muon_plan({"w": ragged((8, 4), (4, 4))}, placement="local")


def test_buckets_keep_to_their_size_and_lose_nothing() -> None:
    layouts = {str(i): ragged((64, 64), (32, 16, 16)) for i in range(9)}
    plan = muon_plan(layouts, placement="owner")
    buckets = fill_buckets(plan.assignments, 9000)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(9))
    assert len(buckets) > 2
    for index in range(3):
        for bucket in schedule_of(plan, index, range(9), 9000).traveling:
            for messages in (bucket.gather_sends, bucket.gather_receives):
                assert sum(message.nbytes for message in messages) <= 9000


def test_buckets_keep_to_their_size_on_the_way_back_too() -> None:
    copies = {str(i): Layout((64, 64), (4,), (Replicate(),)) for i in range(9)}
    plan = muon_plan(copies, placement="owner", replicas="shared")
    assert not any(any(assignment.gathers) for assignment in plan.assignments)
    assert len(fill_buckets(plan.assignments, 64 * 64 * 2)) > 2


def test_what_the_plan_says_is_sent_is_what_the_messages_hold() -> None:
    layouts = {"w": ragged((64, 64), (32, 16, 16)), "v": ragged((30, 7), (0, 1, 29))}
    plan = muon_plan(layouts, placement="owner", row_norm_beta2=0.95)
    for index in range(3):
        buckets = schedule_of(plan, index, [0, 1], 1 << 20).traveling
        sent = sum(m.nbytes for b in buckets for m in (*b.gather_sends, *b.return_sends))
        assert sent == plan.sent[index]


@pytest.mark.parametrize("placement", ["owner", "replicate", "auto"])
def test_bytes_are_those_of_the_transfers(placement: Placing) -> None:
    layouts = {
        "w": ragged((64, 64), (32, 16, 16)),
        "v": ragged((30, 7), (0, 1, 29)),
        "u": ragged((4, 3), (4, 0, 0)),
    }
    copies = {str(i): Layout((64, 64), (4,), (Replicate(),)) for i in range(3)}
    plans = [muon_plan(layouts, placement=placement, row_norm_beta2=0.95)]
    plans.append(muon_plan(copies, placement=placement, replicas="shared"))
    for plan in plans:
        for assignment in plan.assignments:
            for transfers, sent, received in (
                (
                    list(assignment.gathers),
                    assignment.traffic.gather_sent,
                    assignment.traffic.gather_received,
                ),
                (
                    list(assignment.returns),
                    assignment.traffic.return_sent,
                    assignment.traffic.return_received,
                ),
            ):
                for index in range(plan.num_ranks):
                    assert sent.get(index, 0) == sum(t.nbytes for t in transfers if t.source == index)
                    assert received.get(index, 0) == sum(t.nbytes for t in transfers if t.target == index)
                assert {t.source for t in transfers} | {t.target for t in transfers} <= {
                    index for index in range(plan.num_ranks) if assignment.concerns(index)
                }


def test_layers_that_are_cut_alike_have_their_shares_in_common() -> None:
    """Or a plan for 1,024 ranks would take gigabytes in each of them."""
    layouts = ragged_layouts([{f"{i}.w": (512, 64)} for i in range(3)], 64, Blocks())
    first, *others = [a.piece.fields[0].shares for a in muon_plan(layouts).assignments]
    assert len(first) == 64
    assert all(shares is first for shares in others)


def test_matrices_of_stacks_convolutions_heads_and_fused_rows() -> None:
    assert [m[1:] for m in matrices_of("w", (3, 8, 6))] == [(8, 6)] * 3
    assert [m[1:] for m in matrices_of("w", (8, 3, 5, 5))] == [(8, 75)]
    assert [m[1:] for m in matrices_of("w", (8, 3, 5), flatten=True)] == [(8, 15)]
    heads = matrices_of("w", (8, 6), split_rows=(4, 2, 2), heads=4)
    assert [m.region for m in heads] == [Region((start, 0), (2, 6)) for start in (0, 2, 4, 6)]
    assert [m.rows for m in matrices_of("w", (8, 6), split_rows=(4, 3, 1))] == [4, 3, 1]


@pytest.mark.parametrize(
    ("shape", "settings", "words"),
    [
        ((8,), {}, "param 'w': expected a matrix.*algorithm='adamw'"),
        ((8, 6), {"split_rows": (4, 5)}, r"param 'w': split_rows=\(4, 5\) sum to 9, but it has 8 rows"),
        ((8, 6), {"heads": 3}, "param 'w': heads=3 do not divide 8 rows"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_name(
    shape: tuple[int, ...], settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Muon([{"params": [("w", torch.zeros(shape))], **settings}])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adjust_lr": "original"}, "adjust_lr: expected one of .*got 'original'"),
        ({"coefficients": "quintic"}, "coefficients: expected one of .*got 'quintic'"),
        ({"momentum": 1.5}, r"momentum: expected a number in \[0, 1\), got 1.5"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Muon([torch.zeros(2, 2)], **settings)


def test_shares_agree_with_a_search_over_all_ranks() -> None:
    for placement in (
        RaggedShard((0, 1), (7, 0, 20, 3)),
        RaggedShard((0,), (0, 2, 2, 1)),
        Shard(0),
        Shard(1),
    ):
        layout = Layout((5, 6), (4,), (placement,))
        held = {share.holder: share.numel for share in shares_of(layout, Region((1, 0), (3, 6)), (0,), (0,))}
        assert sum(held.values()) == 18
        assert all(held.values())


def test_row_state_lies_with_the_first_element_of_a_row() -> None:
    layout = Layout((5, 3), (3,), (RaggedShard((0, 1), (4, 0, 11)),))
    assert row_layout(layout).placements == (RaggedShard((0,), (2, 0, 3)),)
    columns = Layout((6, 4), (2, 2), (RaggedShard((0,), (1, 5)), Shard(1)))
    assert row_layout(columns).placements == (RaggedShard((0,), (1, 5)), Replicate())


def test_wishes() -> None:
    assert block_for((8, 6), "muon") == Blocks(8, required=False)
    assert block_for((3, 8, 6), "muon") == Blocks(8, required=False)
    assert block_for((8, 6), "muon", heads=4) == Blocks(2, required=False)
    assert block_for((8, 6), "adamw8bit") == Blocks(1, required=False)
    assert block_for((8, 6), "adamw") == block_for((8,), "muon") == Blocks.elements()
    with pytest.raises(ValueError, match="heads=3 do not divide 8 rows"):
        block_for((8, 6), "muon", heads=3)


def test_a_plan_of_meta_parameters() -> None:
    optimizer = Muon([("w", torch.nn.Parameter(torch.empty(8, 4, device="meta")))])
    assert "w                8 x 4  local" in str(optimizer.plan())


def test_a_convolution_of_one_pixel_is_a_matrix_of_its_channels() -> None:
    kernels = {"wide": nn.Conv2d(4, 6, 1), "row": nn.Conv2d(4, 6, (1, 3)), "line": nn.Conv1d(4, 6, 1)}
    model = nn.ModuleDict({**kernels, "one": nn.Conv2d(4, 1, 1), "own": nn.Conv1d(6, 6, 3, groups=6)})
    taken = {name: route.algorithm for name, route in route_params(model).items() if "weight" in name}
    assert taken == {f"{name}.weight": "muon" for name in kernels} | {
        "one.weight": "adamw",
        "own.weight": "adamw",
    }
