"""Blocks, their owners and where their state lies; and the plans of Shampoo for models of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit.boxes import Layout, local_boxes
from shardkit.optim import block_for, ragged_layouts, shampoo_plan
from shardkit.optim.block_algorithm import BlockAlgorithm
from shardkit.optim.blocks import BlockGrid, Dealer, grid_of, stack_layout
from shardkit.optim.pieces import Piece, Region, Share, shares_of
from shardkit.optim.placed import Placed, planned
from shardkit.optim.planning import plan_step
from shardkit.optim.runs import Starts, cut_runs
from shardkit.optim.shampoo import ShampooRule
from shardkit.placement import Blocks, RaggedShard
from tests.unit.test_optim_plan import units_of


def test_blocks_start_anew_at_each_matrix_and_the_last_ones_are_short() -> None:
    grid = grid_of("w", (2, 40, 30), 16)
    assert (grid.shape, grid.rows, grid.cols) == ((2, 3, 2), 16, 16)
    assert [b[1:] for b in grid.blocks] == [(16, 16), (16, 14)] * 2 + [(8, 16), (8, 14)] + (
        [(16, 16), (16, 14)] * 2 + [(8, 16), (8, 14)]
    )
    assert grid.blocks[7].region == Region((1, 0, 16), (1, 16, 14))
    assert grid.blocks[7].region.label((2, 40, 30)) == "[1, 0:16, 16:30]"


def test_a_convolution_is_cut_between_input_channels() -> None:
    grid = grid_of("w", (8, 6, 5, 5), 64)
    assert (grid.shape, grid.rows, grid.cols) == ((1, 3), 8, 50)
    assert [b.region for b in grid.blocks] == [Region((0, c, 0, 0), (8, 2, 5, 5)) for c in (0, 2, 4)]
    assert grid_of("w", (8, 6, 5, 5), 16).cols == 25  # a channel is never cut


def pieces_of(at: Placed, block: int, dealer: Dealer | None = None) -> list[Piece]:
    algorithm = BlockAlgorithm(ShampooRule())
    return algorithm.pieces(at, {**ShampooRule.defaults, "block": block}, dealer or Dealer())


def owners(layout: Layout, block: int) -> list[int]:
    homes = [piece.home for piece in pieces_of(planned("w", layout), block)]
    return [home.rank for home in homes if home is not None]


def test_the_blocks_of_a_cut_band_go_to_its_holders_in_order() -> None:
    layout = Layout((40, 32), (2,), (RaggedShard((0,), (24, 16)),))
    assert owners(layout, 16) == [0, 0, 0, 1, 1, 1]
    at = planned("w", layout)
    state = stack_layout(at, grid_of("w", layout.shape, 16), pieces_of(at, 16), (16, 16))
    assert state.shape == (3, 2, 16, 16) and state.placements == (RaggedShard((0, 1), (3, 3)),)


def test_ranks_with_less_than_a_row_own_blocks_that_they_hold() -> None:
    """The first four ranks hold row 0, the others row 1, of one band of four blocks."""
    layout = Layout((2, 64), (8,), (RaggedShard((0, 1), (16,) * 8),))
    found = owners(layout, 16)
    assert found == sorted(found)
    assert all(rank % 4 == column for column, rank in enumerate(found))


def test_runs_are_cut_where_the_least_travels() -> None:
    """Six blocks of two ranks, of which the second may start at block 2, 3 or 4."""
    starts = [Starts(2, [0.0, 0.5, 1.0])]
    assert cut_runs([1.0] * 6, starts, [3.0, 4.0]) == [0, 2, 6]
    assert cut_runs([1.0] * 6, starts, [3.0, 3.5]) == [0, 3, 6]
    assert cut_runs([1.0] * 6, starts, [3.5, 2.5]) == [0, 3, 6]  # both may do half a block more then
    assert cut_runs([1.0] * 6, starts, [0.0, 0.0]) == [0, 2, 6]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_other_runs_within_the_rooms_let_less_travel(data: st.DataObject) -> None:
    num_blocks, num_ranks = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    costs = data.draw(st.lists(st.integers(1, 3).map(float), min_size=num_blocks, max_size=num_blocks))
    price = st.integers(0, 9).map(float)
    starts = [
        Starts(0, data.draw(st.lists(price, min_size=num_blocks + 1, max_size=num_blocks + 1)))
        for _ in range(num_ranks - 1)
    ]
    rooms = data.draw(st.lists(st.integers(0, 9).map(float), min_size=num_ranks, max_size=num_ranks))
    found = cut_runs(costs, starts, rooms)

    def price_of(cuts: Sequence[int]) -> float:
        return sum(start.prices[cut] for start, cut in zip(starts, cuts[1:-1], strict=True))

    def excess_of(cuts: Sequence[int]) -> float:
        return max(sum(costs[a:b]) - room for (a, b), room in zip(pairwise(cuts), rooms, strict=True))

    ways = [
        (0, *cuts, num_blocks) for cuts in combinations_with_replacement(range(num_blocks + 1), num_ranks - 1)
    ]
    allowed = next(
        extra
        for extra in (0.0, *(max(costs) / 2 * 2**i for i in range(9)))
        if any(excess_of(way) <= extra for way in ways)
    )
    assert excess_of(found) <= allowed
    assert price_of(found) == min(price_of(way) for way in ways if excess_of(way) <= allowed)


def test_columns_that_are_cut_between_blocks_stay_where_they_are() -> None:
    assert owners(Layout((32, 64), (2,), (Shard(1),)), 16) == [0, 0, 1, 1] * 2
    at = planned("w", Layout((32, 64), (2,), (Shard(1),)))
    state = stack_layout(at, grid_of("w", (32, 64), 16), pieces_of(at, 16), (16, 16))
    assert state.placements == (Shard(1),)
    assert owners(Layout((2, 64, 16), (2,), (Shard(1),)), 16) == [0, 0, 1, 1] * 2
    cut = owners(Layout((32, 64), (3,), (Shard(1),)), 16)
    assert cut == sorted(cut) and {cut.count(rank) for rank in range(3)} <= {2, 3}


ROWS = st.integers(1, 40)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Of matrices and stacks, on one axis or two, cut by rows, columns, inside rows; empty ranks too."""
    shape = (draw(st.integers(1, 3)),) * draw(st.booleans()) + (draw(ROWS), draw(ROWS))
    tp = draw(st.sampled_from([None, *range(len(shape))]))
    mesh = (draw(st.integers(1, 5)), draw(st.integers(1, 3)) if tp is not None else 1)
    other: Placement = Replicate() if tp is None else Shard(tp)
    if draw(st.booleans()):
        return Layout(shape, mesh, (Shard(draw(st.integers(0, len(shape) - 1))), other))
    dims = draw(st.integers(1, len(shape)))
    units: dict[int, tuple[int, ...]] = {}
    for place in range(mesh[1]):
        held = [box.size for box in local_boxes(Layout(shape, mesh, (Replicate(), other)), (0, place))]
        total = 0
        for size in held:
            total = 1
            for n in size[:dims]:
                total *= n
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=mesh[0] - 1, max_size=mesh[0] - 1)))
        units[place] = tuple(b - a for a, b in pairwise([0, *cuts, total]))
    ragged = RaggedShard(tuple(range(dims)), units[0])
    return Layout(shape, mesh, (ragged, other), tuple(((place,), u) for place, u in units.items()))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(1, 16))
def test_every_block_has_one_home_and_its_state_lies_there(layout: Layout, block: int) -> None:
    """The slots of a rank are the places of its own local tensor, for every rank as it sees itself."""
    at = planned("w", layout)
    grid, pieces = grid_of("w", layout.shape, block), pieces_of(at, block)
    if at.axes == (0,) and layout.placements[0] not in (Shard(1), Shard(2)):
        for piece in pieces:
            assert piece.home is not None
            assert piece.home.rank in {share.holder for share in piece.fields[0].shares}
    coordinates = [
        tuple(c if axis in at.axes else 0 for axis, c in enumerate(place))
        for place in ((i, j) for i in range(layout.mesh_shape[0]) for j in range(layout.mesh_shape[1]))
    ]
    found = {}
    for rank, coordinate in enumerate(dict.fromkeys(coordinates)):
        state = stack_layout(replace(at, me=coordinate), grid, pieces, (1, 1))
        state.check(coordinate)
        numbers = []
        for box in local_boxes(state, coordinate):
            for number, _ in enumerate(pieces):
                index = place_in(grid.shape, number)
                if all(a <= i < a + n for i, a, n in zip(index, box.offset, box.size, strict=False)):
                    numbers.append(number)
        found |= {number: (rank, slot) for slot, number in enumerate(numbers)}
    assert [found[number] for number in range(len(pieces))] == [tuple(piece.home or ()) for piece in pieces]


def place_in(shape: Sequence[int], number: int) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        index.insert(0, place)
    return tuple(index)


def test_what_a_parameter_is_dealt_does_not_depend_on_later_ones() -> None:
    layouts = [Layout((rows, 64), (3,), (Shard(0),)) for rows in (40, 70, 33)]
    short, long = Dealer(), Dealer()
    first = [pieces_of(planned(str(i), layout), 16, short) for i, layout in enumerate(layouts[:2])]
    then = [pieces_of(planned(str(i), layout), 16, long) for i, layout in enumerate(layouts)]
    assert first == then[:2]
    numbers = [[piece.number for piece in pieces] for pieces in then]
    assert [own[-1] - own[0] + 1 for own in numbers] == [12, 20, 12]  # one after another
    alone = pieces_of(planned("2", layouts[2]), 16)
    assert [piece.number for piece in alone] == numbers[2]  # by name, whatever came before


# GB that a rank sends in the mean, busiest over mean cost of roots: Llama-3-8B as counted with the hybrid
# rule, which lets any rank own any block
COUNTED = """
    block  layers    8 ranks        64 ranks       512 ranks
    256    1         .067  1.08     .107  1.09     .076  1.08
    256    4         0     1.00     .015  1.08     .033  1.08
    512    4         0     1.00     .066  1.10     .052  1.08
    1024   1         .403  1.08     .417  1.08     .101  1.23
    1024   4         0     1.00     .095  1.08     .080  1.23
    2048   4         0     1.00     .254  1.07     .090  2.14
"""
ROWS_COUNTED = [
    (int(block), int(layers), num_ranks, *figures[2 * i : 2 * i + 2])
    for block, layers, *figures in map(str.split, COUNTED.strip().splitlines()[1:])
    for i, num_ranks in enumerate((8, 64, 512))
]
# What is missed. Owners that hold part of what they own, with at most 112 blocks for 104, send .4196 GB at
# least: a linear programme over all blocks and holders. With 2048, 512 ranks balance at 1.22, not 2.14.
MORE = {(1024, 1, 64): ".420", (2048, 4, 512): ".091"}


def dealt(layouts: dict[str, Layout], block: int) -> tuple[float, float]:
    """GB a rank in the mean and busiest over mean, as a plan has them; what lies alike is read once."""

    @cache
    def read(layout: Layout) -> tuple[BlockGrid, list[tuple[Share, ...]]]:
        at, grid = planned("w", layout), grid_of("w", layout.shape, block)
        return grid, [shares_of(layout, b.region, at.axes, at.me) for b in grid.blocks]

    dealer, rule, sent, loads = Dealer(), ShampooRule(), 0, Counter[int]()
    num_ranks = next(iter(layouts.values())).mesh_shape[0]
    for layout in layouts.values():
        grid, shares = read(layout)
        costs = [rule.flops(b.rows, b.cols, dict(rule.defaults)) for b in grid.blocks]
        homes = dealer.deal(planned("w", layout), grid, shares, costs)
        for b, held, home in zip(grid.blocks, shares, homes, strict=True):
            kept = sum(share.numel for share in held if share.holder == home.rank)
            sent += 2 * 4 * (b.rows * b.cols - kept)
            loads[home.rank] += b.rows**3 + b.cols**3
    return sent / num_ranks / 1e9, max(loads.values()) * num_ranks / loads.total()


@pytest.mark.parametrize(("block", "layers_per_unit", "num_ranks", "mean_gb", "balance"), ROWS_COUNTED)
def test_bytes_and_balance_of_llama(
    block: int, layers_per_unit: int, num_ranks: int, mean_gb: str, balance: str
) -> None:
    layouts = ragged_layouts(units_of("llama", layers_per_unit), num_ranks, Blocks.elements())
    mean_gb = MORE.get((block, layers_per_unit, num_ranks), mean_gb)
    for figure, text in zip(dealt(layouts, block), (mean_gb, balance), strict=True):
        last_digit = 10.0 ** -len(text.partition(".")[2]) if "." in text else 0.0
        assert figure <= float(text) + 0.5001 * last_digit


def test_what_is_dealt_is_what_a_plan_sends() -> None:
    layouts = ragged_layouts(units_of("llama", 4), 64, Blocks.elements())
    found = shampoo_plan(layouts).balance
    assert dealt(layouts, 1024) == (
        pytest.approx(found.mean_sent_bytes / 1e9),
        pytest.approx(found.max_over_mean_flops),
    )


def test_runs_of_holders_send_no_more_than_owners_of_any_kind() -> None:
    """On whole rows, as `fully_shard` cuts ragged parameters; 4-layer units of Llama-3-8B on 64 ranks."""
    layouts = ragged_layouts(units_of("llama", 4), 64)
    plan = shampoo_plan(layouts)
    free = [replace(assignment.piece, home=None) for assignment in plan.assignments]
    hybrid = plan_step(free, 64, ["owner"] * len(free)).balance
    assert plan.balance.mean_sent_bytes <= hybrid.mean_sent_bytes
    assert plan.balance.max_over_mean_flops <= hybrid.max_over_mean_flops + 1e-9


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_cuts_between_the_edges_of_blocks_keep_the_balance(tp: int) -> None:
    """3584 rows of a gate are 3.5 bands: what a column of ranks is given it need not hold."""
    layouts = {}
    for name, shape in units_of("llama", 8)[0].items():
        dim = int(name.endswith(("o", "down")))
        rows = shape[0] // (1 if dim else tp)
        ragged = RaggedShard((0,), (rows // 8,) * 8)
        layouts[name] = Layout(shape, (8, tp), (ragged, Shard(dim)))
    found = shampoo_plan(layouts).balance
    assert found.max_over_mean_flops <= 1.105
    num_bytes = 4 * sum(rows * cols for rows, cols in units_of("llama", 8)[0].values())
    assert found.mean_sent_bytes <= 2 * num_bytes / (8 * tp)


def test_a_plan_prints_blocks_and_their_owners() -> None:
    layout = Layout((40, 32), (2,), (RaggedShard((0,), (24, 16)),))
    assert str(shampoo_plan({"w": layout}, block=16)).splitlines()[:5] == [
        "piece                     matrix  mode          rank       moved      FLOPs",
        "w[0:16, 0:16]            16 x 16  local            0         0 B   3.46e+04",
        "w[0:16, 16:32]           16 x 16  local            0         0 B   3.46e+04",
        "w[16:32, 0:16]           16 x 16  owner            0     1.02 kB   3.46e+04",
        "w[16:32, 16:32]          16 x 16  owner            1     1.02 kB   3.46e+04",
    ]


def test_wishes() -> None:
    assert (
        block_for((4096, 512), "shampoo") == block_for((8, 4096, 9), "soap") == Blocks(1024, required=False)
    )
    assert block_for((40, 512), "shampoo") == Blocks(40, required=False)
    assert block_for((4096, 512), "soap", block=64) == Blocks(64, required=False)
    assert block_for((4096,), "shampoo") == Blocks.elements()
