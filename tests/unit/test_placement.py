"""Blocks, RaggedShard and the boxes of any placement, against brute force on index tensors; no processes."""

from __future__ import annotations

import copy
import math
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard

from shardkit.boxes import Box, Layout, local_boxes, local_part, local_shape
from shardkit.placement import Blocks, RaggedShard, block_numel, contiguous_stride
from tests.unit.layouts import coordinates, held, layouts, mesh_shapes, shapes


@pytest.mark.parametrize(
    ("blocks", "shape", "expected"),
    [
        (Blocks(), (8, 3), (3, None)),
        (Blocks(2), (8, 3), (6, None)),
        (Blocks(2), (7, 3), (6, None)),
        (Blocks(100), (8, 3), (24, None)),
        (Blocks(2), (4, 5, 3), (6, 15)),
        (Blocks(5), (4, 5, 3), (15, None)),
        (Blocks(2), (4, 6, 3), (6, None)),
        (Blocks(2), (6, 4, 3, 3), (72, None)),
        (Blocks(2), (7,), (1, None)),
        (Blocks(2), (), (1, None)),
        (Blocks(2), (0, 3), (3, None)),
        (Blocks(2), (4, 0), (1, None)),
        (Blocks(2), (2, 0, 3), (3, None)),
        (Blocks.whole(), (0, 3), (3, None)),
        (Blocks.elements(), (8, 3), (1, None)),
        (Blocks.whole(), (8, 3), (24, None)),
        (Blocks.whole(), (4, 5, 3), (15, None)),
        (Blocks.whole(), (6, 4, 3, 3), (216, None)),
        (Blocks.whole(), (8,), (1, None)),
    ],
)
def test_a_block_is_counted_in_elements_and_restarts_at_each_matrix_of_a_stack(blocks, shape, expected):
    assert block_numel(blocks, shape) == expected


def test_blocks_print_as_they_are_written():
    wishes = (Blocks(), Blocks(4, required=False), Blocks.elements(), Blocks.whole())
    assert list(map(repr, wishes)) == [
        "Blocks(1)",
        "Blocks(4, required=False)",
        "Blocks.elements()",
        "Blocks.whole()",
    ]


def test_blocks_of_no_rows_are_refused_and_the_way_out_is_named():
    with pytest.raises(ValueError, match=re.escape("Blocks(rows=0): expected rows >= 1. For cuts anywhere")):
        Blocks(0)


def test_a_placement_survives_pickle_deepcopy_and_prints_as_it_is_written():
    placement = RaggedShard((0,), (1, 4, 0), block=2)
    assert pickle.loads(pickle.dumps(placement)) == placement == copy.deepcopy(placement)
    assert eval(repr(placement)) == placement
    assert hash(placement) == hash(RaggedShard((0,), (1, 4, 0), block=2))


def test_equality_includes_the_block_and_same_layout_does_not():
    placement = RaggedShard((0,), (2, 4, 0), block=2)
    other = RaggedShard((0,), (2, 4, 0))
    assert placement != other
    assert placement.same_layout(other)
    assert not placement.same_layout(RaggedShard((0,), (4, 2, 0)))
    assert not placement.same_layout(Shard(0))
    assert placement != Shard(0)
    assert Shard(0) != placement


@pytest.mark.parametrize("question", ["is_shard", "is_replicate", "is_partial"])
def test_stock_code_that_asks_what_a_ragged_placement_is_fails_by_name(question):
    with pytest.raises(NotImplementedError, match=f"{question}.*Use shardkit.redistribute"):
        getattr(RaggedShard((0,), (1, 2)), question)()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedShard((1,), (1, 2)), "expected dims to be a prefix"),
        (lambda: RaggedShard((0,), (1, -2)), "one count >= 0 a rank"),
        (lambda: RaggedShard((0,), ()), "one count >= 0 a rank"),
        (lambda: RaggedShard((0,), (1, 2), 0), "expected block >= 1"),
        (lambda: RaggedShard((0,), (1, 2)).check((3, 2), 3), "for each of 3 ranks, got 2"),
        (
            lambda: RaggedShard((0,), (1, 2)).check((4, 2), 2),
            "have 4 units, got 3. Make local_units sum to 4",
        ),
        (lambda: RaggedShard((0, 1), (1, 2)).check((3,), 2), "has too few dims"),
        (lambda: RaggedShard((0,), (3, 5), 2).check((8, 2), 2), "boundary at unit 3 .* cuts a block of 2"),
        (lambda: RaggedShard((0, 1), (6, 4), 2).check((2, 5, 3), 2), "boundary at unit 6"),
    ],
)
def test_a_placement_that_cannot_hold_a_tensor_says_what_and_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_blocks_restart_at_each_matrix_so_an_odd_boundary_may_be_an_edge():
    RaggedShard((0, 1), (7, 3), 2).check((2, 5, 3), 2)  # 7 = a matrix of 5 rows and one block of 2
    RaggedShard((0, 1), (5, 5), 2).check((2, 5, 3), 2)
    RaggedShard((0,), (8, 0, 1), 4).check((9, 2), 3)  # the last block is short


def test_from_numels_takes_the_shortest_prefix_that_cuts_no_unit():
    assert RaggedShard.from_numels((5, 3), (3, 12, 0), 3) == RaggedShard((0,), (1, 4, 0))
    assert RaggedShard.from_numels((5, 3), (4, 0, 11)) == RaggedShard((0, 1), (4, 0, 11))
    assert RaggedShard.from_numels((4, 5, 3), (6, 9, 45), 3) == RaggedShard((0, 1), (2, 3, 15))
    assert RaggedShard.from_numels((4, 5, 3), (15, 45), 15) == RaggedShard((0,), (1, 3))
    assert RaggedShard.from_numels((4, 2, 3), (12, 12), 6) == RaggedShard((0,), (2, 2))
    assert RaggedShard.from_numels((4, 2, 3), (12, 12), 6, min_dims=2) == RaggedShard((0, 1), (4, 4), 2)
    assert RaggedShard.from_numels((), (0, 1)) == RaggedShard((), (0, 1))
    RaggedShard.from_numels((0, 3), (0, 0)).check((0, 3), 2)
    RaggedShard.from_numels((3, 0), (0, 0)).check((3, 0), 2)


def test_boxes_of_a_cut_inside_rows_are_head_body_and_tail():
    layout = Layout((5, 3), (3,), (RaggedShard((0, 1), (4, 0, 11)),))
    assert local_boxes(layout, (0,)) == (
        Box((0, 0), (1, 3), 0, (3, 1)),
        Box((1, 0), (1, 1), 3, (3, 1)),
    )
    assert local_boxes(layout, (1,)) == ()
    assert local_boxes(layout, (2,)) == (
        Box((1, 1), (1, 2), 0, (3, 1)),
        Box((2, 0), (3, 3), 2, (3, 1)),
    )


def test_tensor_parallelism_cuts_first_and_whole_rows_are_one_box():
    layout = Layout((6, 2), (2, 2), (RaggedShard((0,), (1, 2)), Shard(0)))
    assert [box.offset for box in local_boxes(layout, (1, 1))] == [(4, 0)]
    assert local_shape(layout, (1, 1)) == (2, 2)


@settings(max_examples=300, deadline=None)
@given(st.data(), shapes, mesh_shapes)
def test_boxes_hold_what_torch_chunking_and_a_flat_slice_give(data, shape, mesh_shape):
    layout = data.draw(layouts(shape, mesh_shape))
    full = torch.arange(math.prod(shape)).view(shape)
    for coordinate in coordinates(mesh_shape):
        expected = held(full, layout, coordinate)
        layout.check(coordinate)
        assert local_shape(layout, coordinate) == tuple(expected.shape)
        boxes = local_boxes(layout, coordinate)
        assert sum(math.prod(box.size) for box in boxes) == expected.numel()
        for box in boxes:
            region = tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))
            assert torch.equal(box.view(expected), full[region])
        assert torch.equal(local_part(full, layout, coordinate), expected)


@settings(max_examples=100, deadline=None)
@given(shapes)
def test_contiguous_stride_is_torchs(shape):
    assert contiguous_stride(shape) == torch.empty(shape, device="meta").stride()
