"""Every element of every parameter has one place in the rows, at any shapes, dims and ranks.

The tests number all elements of all parameters and carry the numbers through a layout as buffers would:
segment by segment into the rows, and from there into each rank's shard and into the gathered parameters.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardkit.layout import (
    ALIGN,
    Layout,
    RaggedParam,
    RaggedSource,
    ShardedShape,
    can_be_direct,
    interleaved_layout,
    ragged_layout,
    reduce_layout,
)
from shardkit.placement import Blocks, RaggedShard, block_numel
from shardkit.plan import TensorSpec, plan_buckets

NOTHING = -1  # what the rows hold where no parameter writes

sizes = st.one_of(st.integers(0, 9), st.sampled_from([16, 32, 33, 48, 64]))
shapes = st.lists(sizes, min_size=1, max_size=3).map(tuple)
ranks = st.integers(1, 8)


class Laid(NamedTuple):
    """A layout as every rank sees it, and what each rank must hold of each parameter."""

    layouts: list[Layout]
    params: list[Tensor]  # the numbers of its elements
    held: list[list[Tensor]]  # by rank and parameter

    def reduced(self, indices: list[int]) -> Laid:
        """The same of the rows of a reduction of some of the parameters."""
        return Laid(
            [reduce_layout(layout, indices).rows for layout in self.layouts],
            [self.params[index] for index in indices],
            [[held[index] for index in indices] for held in self.held],
        )


def numbered(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes whose elements are all different."""
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + math.prod(shape))
    return [
        torch.arange(start, end).view(shape)
        for (start, end), shape in zip(pairwise(starts), shapes, strict=True)
    ]


def chunks(param: Tensor, num_ranks: int, dim: int) -> list[Tensor]:
    """By torch.chunk, which leaves out what is empty."""
    parts = list(torch.chunk(param, num_ranks, dim)) if param.shape[dim] else []
    return parts + [param.narrow(dim, 0, 0)] * (num_ranks - len(parts))


@st.composite
def interleaved(draw: st.DrawFn) -> Laid:
    """Parameters cut on any dim; on dims other than the first, evenly."""
    num_ranks = draw(ranks)
    sharded = []
    for index, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=4))):
        even = [dim for dim, size in enumerate(shape) if dim == 0 or size % num_ranks == 0]
        sharded.append(ShardedShape(f"p{index}", shape, draw(st.sampled_from(even))))
    params = numbered([param.shape for param in sharded])
    cut = [chunks(value, num_ranks, param.dim) for value, param in zip(params, sharded, strict=True)]
    return Laid(
        [interleaved_layout(sharded, num_ranks, rank) for rank in range(num_ranks)],
        params,
        [list(held) for held in zip(*cut, strict=True)],
    )


@st.composite
def ragged(draw: st.DrawFn) -> Laid:
    """Parameters with any wishes, where the planner puts them."""
    num_ranks = draw(ranks)
    of_shapes = draw(st.lists(shapes, min_size=1, max_size=4))
    wishes = st.sampled_from([Blocks(), Blocks(3), Blocks(16), Blocks.elements(), Blocks.whole()])
    specs = []
    for index, shape in enumerate(of_shapes):
        block = block_numel(draw(wishes), shape)
        specs.append(TensorSpec(f"p{index}", math.prod(shape), block.block_numel, block.period_numel))
    (plan,) = plan_buckets(
        specs, num_ranks, unit_numel=ALIGN, align_numel=ALIGN, max_padding=1e9, max_buckets=1
    )
    params, layouts, held = numbered(of_shapes), [], []
    for rank in range(num_ranks):
        held.append([])
        pieces = []
        for name, param in zip(plan.starts, params, strict=True):
            local = plan.local_range(name, rank)
            numels = [plan.local_range(name, r).numel for r in range(num_ranks)]
            placement = RaggedShard.from_numels(param.shape, numels, plan.blocks[name])
            shape = placement.local_shape(param.shape, rank)
            held[-1].append(param.flatten()[local.start_in_tensor :][: local.numel].view(shape))
            pieces.append(RaggedParam(name, tuple(param.shape), shape))
        source = RaggedSource(plan, tuple(pieces))
        layouts.append(ragged_layout(source, rank, range(len(pieces))))
    return Laid(layouts, params, held)


laid = st.one_of(interleaved(), ragged())


@st.composite
def reduced(draw: st.DrawFn) -> Laid:
    """Some of the parameters in the rows of a reduction, with a tail behind each row."""
    whole = draw(laid)
    indices = draw(st.lists(st.sampled_from(range(len(whole.params))), min_size=1, unique=True).map(sorted))
    return whole.reduced(indices)


def rows_of(layout: Layout, params: list[Tensor]) -> Tensor:
    """What the segments write into the rows (num_ranks * row_numel,); they read every element once."""
    rows = torch.full((layout.numel,), NOTHING)
    for slot, param in zip(layout.slots, params, strict=True):
        num_read = torch.zeros(param.numel(), dtype=torch.int64)
        for s in slot.segments:
            place = rows.as_strided(s.size, s.rows_strides, s.rows_offset)
            assert (place == NOTHING).all(), f"{slot.name} overlaps what is there"
            place.copy_(param.flatten().as_strided(s.size, s.param_strides, s.param_offset))
            num_read.as_strided(s.size, s.param_strides, s.param_offset).add_(1)
        assert (num_read == 1).all(), f"{slot.name}: segments do not cover it once"
    return rows


def assert_well_laid(case: Laid) -> None:
    """Segments, gaps and tails cover the rows exactly, and rows and shards hold what they must."""
    layout = case.layouts[0]
    rows = rows_of(layout, case.params)
    assert len(rows[rows != NOTHING]) == sum(param.numel() for param in case.params)

    num_left_open = torch.zeros(layout.numel, dtype=torch.int64)
    for gap in layout.gaps:
        assert gap.numel > 0
        num_left_open.as_strided((gap.num_rows, gap.numel), (layout.row_numel, 1), gap.offset).add_(1)
    assert num_left_open.sum() == layout.padding_numel
    num_left_open.view(layout.num_ranks, -1)[:, layout.row_numel - layout.tail_numel :].add_(1)
    assert torch.equal(num_left_open, (rows == NOTHING).long()), "gaps and tails are not what is left open"

    for rank, (seen, held) in enumerate(zip(case.layouts, case.held, strict=True)):
        assert (seen.rank, seen.describe(), seen.gaps) == (rank, layout.describe(), layout.gaps)
        row = rows[rank * layout.row_numel :][: layout.row_numel]
        for slot, expected in zip(seen.slots, held, strict=True):
            assert slot.local_shape == tuple(expected.shape)
            part = row[slot.shard_offset :][: math.prod(slot.local_shape)]
            assert torch.equal(part.view(slot.local_shape), expected)


@settings(deadline=None)
@given(laid)
def test_every_element_has_one_place_in_the_rows(case: Laid) -> None:
    assert_well_laid(case)


@settings(deadline=None)
@given(reduced())
def test_every_gradient_has_one_place_in_the_rows_of_a_reduction(case: Laid) -> None:
    assert_well_laid(case)
    assert case.layouts[0].tail_numel == 2 * len(case.params)


@settings(deadline=None)
@given(laid, st.data())
def test_every_gradient_is_received_once_directly_or_in_a_row(case: Laid, data: st.DataObject) -> None:
    some = st.lists(st.sampled_from(range(len(case.params))), min_size=1, unique=True)
    indices = data.draw(some.map(sorted))
    able = [index for index in indices if can_be_direct(case.layouts[0], index)]
    direct = set(data.draw(st.lists(st.sampled_from(able), unique=True))) if able else set()
    others = [index for index in indices if index not in direct]
    reduced = [reduce_layout(layout, indices, direct) for layout in case.layouts]
    in_rows = Laid(
        [layout.rows for layout in reduced],
        [case.params[index] for index in others],
        [[held[index] for index in others] for held in case.held],
    )
    assert_well_laid(in_rows)
    rows = rows_of(reduced[0].rows, in_rows.params).view(len(reduced), -1)
    for rank, layout in enumerate(reduced):
        assert layout.tail_numel == 2 * len(indices)
        received = torch.full((layout.row_numel,), NOTHING)
        received[layout.row_offset :] = rows[rank]
        for position, parts in layout.direct.items():
            sent = case.params[indices[position]].flatten().split(parts.numels)
            place = received[layout.places[position].offset :][: parts.numels[rank]]
            assert (place == NOTHING).all()
            place.copy_(sent[rank])
        for index, (offset, shape) in zip(indices, layout.places, strict=True):
            assert torch.equal(received[offset:][: math.prod(shape)].view(shape), case.held[rank][index])
    own = [sum(parts.numels[rank] for parts in reduced[0].direct.values()) for rank in range(len(reduced))]
    sent_in_all = sum(layout.sent_numel for layout in reduced)
    assert sent_in_all == (len(reduced) - 1) * (sum(own) + rows.numel())


@settings(deadline=None)
@given(laid)
def test_gathered_parameters_are_aligned_and_do_not_overlap(case: Laid) -> None:
    layout = case.layouts[0]
    assert layout.row_numel % ALIGN == 0
    end = 0
    for slot in sorted(layout.slots, key=lambda slot: (slot.unsharded_offset, slot.numel)):
        assert slot.unsharded_offset % ALIGN == 0
        assert slot.unsharded_offset >= end
        end = slot.unsharded_offset + slot.numel
    assert end <= layout.unsharded_numel


@settings(deadline=None)
@given(laid)
def test_rows_that_are_used_in_place_are_the_parameters(case: Laid) -> None:
    layout = case.layouts[0]
    if layout.in_place:
        rows = rows_of(layout, case.params)
        for slot, param in zip(layout.slots, case.params, strict=True):
            assert torch.equal(rows[slot.unsharded_offset :][: slot.numel], param.flatten())


@settings(deadline=None)
@given(ragged())
def test_ragged_rows_are_always_the_parameters(case: Laid) -> None:
    assert all(layout.in_place for layout in case.layouts)


@settings(deadline=None)
@given(interleaved())
def test_columns_add_up_to_the_row_and_split_into_the_parameters(case: Laid) -> None:
    """As `torch.split_with_sizes_copy` fills the gathered parameters, their neighbours untouched."""
    layout = case.layouts[0]
    if not layout.columns:
        return
    columns = rows_of(layout, case.params).view(layout.num_ranks, -1)
    unsharded = torch.full((layout.unsharded_numel,), NOTHING)
    assert sum(numel for numel, _ in layout.columns) == layout.row_numel
    assert sorted(index for _, index in layout.columns if index >= 0) == list(range(len(case.params)))
    start = 0
    for numel, index in layout.columns:
        if index >= 0:
            place = unsharded[layout.slots[index].unsharded_offset :][: layout.num_ranks * numel]
            assert (place == NOTHING).all()
            place.view(layout.num_ranks, numel).copy_(columns[:, start : start + numel])
        start += numel
    for slot, param in zip(layout.slots, case.params, strict=True):
        assert torch.equal(unsharded[slot.unsharded_offset :][: slot.numel], param.flatten())


@pytest.mark.parametrize(
    ("shapes", "num_ranks", "in_place"),
    [
        ([(64, 2)], 4, True),  # one parameter whose chunks fill the rows
        ([(60, 2)], 4, False),  # rows end in padding
        ([(64, 2), (64, 2)], 4, False),  # two take turns
        ([(3,), (5, 7)], 1, True),  # one row
    ],
)
def test_one_even_parameter_or_one_rank_needs_no_copy(
    shapes: list[tuple[int, ...]], num_ranks: int, in_place: bool
) -> None:
    params = [ShardedShape(f"p{index}", shape, 0) for index, shape in enumerate(shapes)]
    assert interleaved_layout(params, num_ranks, 0).in_place == in_place


def test_the_module_docstring_draws_what_is_laid_out() -> None:
    layout = interleaved_layout([ShardedShape("w", (4, 2), 0), ShardedShape("b", (3,), 0)], 2, 1)
    w, b = layout.slots
    assert (w.shard_offset, w.local_shape) == (0, (2, 2))
    assert (b.shard_offset, b.local_shape) == (4, (1,))
    assert (layout.row_numel, layout.padding_numel) == (16, 2 * 16 - 8 - 3)
    assert [(gap.offset, gap.num_rows, gap.numel) for gap in layout.gaps] == [(21, 1, 1), (6, 2, 10)]
