"""Who sends what to whom between two layouts: pure plans, carried out on all ranks in one process."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardkit.boxes import Box, Layout, local_boxes, local_shape
from shardkit.exchange import Message, plan_exchange
from shardkit.placement import RaggedShard
from tests.unit.layouts import coordinates, held, layouts, mesh_shapes, shapes


def _carry_out(source: Layout, target: Layout, locals_: dict[tuple[int, ...], torch.Tensor]):
    """The new local tensors, by the plans of all ranks; and the elements each pair of ranks exchanged."""
    plans = {me: plan_exchange(source, target, me) for me in coordinates(source.mesh_shape)}
    moved: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    new_locals = {}
    for me, plan in plans.items():
        new = torch.zeros(local_shape(target, me), dtype=torch.int64)
        for message in plan.receives:
            (sent,) = [m for m in plans[message.peer].sends if m.peer == me]
            assert len(sent.boxes) == len(message.boxes)
            for theirs, ours in zip(sent.boxes, message.boxes, strict=True):
                ours.view(new).add_(theirs.view(locals_[message.peer]))
            moved[message.peer, me] = message.numel
        for message in plan.sends:
            assert any(m.peer == me for m in plans[message.peer].receives)
        new_locals[me] = new
    return new_locals, moved


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes, mesh_shapes)
def test_any_layout_becomes_any_other_and_only_what_is_missing_moves(data, shape, mesh_shape):
    source = data.draw(layouts(shape, mesh_shape))
    target = data.draw(layouts(shape, mesh_shape))
    full = torch.arange(math.prod(shape)).view(shape) + 1
    locals_ = {me: held(full, source, me) for me in coordinates(mesh_shape)}
    new_locals, moved = _carry_out(source, target, locals_)
    for me in coordinates(mesh_shape):
        wanted = held(full, target, me)
        assert torch.equal(new_locals[me], wanted)
        missing = set(wanted.flatten().tolist()) - set(locals_[me].flatten().tolist())
        received = sum(numel for (giver, taker), numel in moved.items() if taker == me != giver)
        assert received == len(missing)


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes, mesh_shapes, st.integers(0, 2))
def test_pending_sums_reach_each_owner_once_from_each_rank(data, shape, mesh_shape, axis):
    axis %= len(mesh_shape)
    base = data.draw(layouts(shape, mesh_shape))
    target = data.draw(layouts(shape, mesh_shape))
    if isinstance(base.placements[axis], RaggedShard):
        base = Layout(shape, mesh_shape, (Replicate(),) * len(mesh_shape))
    placements = list(base.placements)
    placements[axis] = Replicate()
    plain = Layout(shape, mesh_shape, tuple(placements))
    if base.ragged_axis is not None or isinstance(target.placements[axis], Replicate):
        return
    placements[axis] = Partial()
    source = Layout(shape, mesh_shape, tuple(placements))
    full = torch.arange(math.prod(shape)).view(shape) + 1
    locals_ = {me: held(full, plain, me) * (1 + me[axis]) for me in coordinates(mesh_shape)}
    new_locals, _ = _carry_out(source, target, locals_)
    factor = sum(1 + rank for rank in range(mesh_shape[axis]))
    for me in coordinates(mesh_shape):
        assert torch.equal(new_locals[me], held(full, target, me) * factor)


def test_a_gather_to_one_rank_involves_only_holders():
    source = Layout((6, 2), (4,), (RaggedShard((0,), (2, 0, 3, 1)),))
    target = Layout((6, 2), (4,), (RaggedShard((0,), (0, 0, 0, 6)),))
    plans = [plan_exchange(source, target, (rank,)) for rank in range(4)]
    assert [[m.peer for m in plan.sends] for plan in plans] == [[(3,)], [], [(3,)], [(3,)]]
    assert [[(m.peer, m.numel) for m in plan.receives] for plan in plans] == [
        [],
        [],
        [],
        [((0,), 4), ((2,), 6), ((3,), 2)],
    ]


def test_a_reduce_scatter_sends_each_rank_only_its_part():
    source, target = Layout((6, 2), (3,), (Partial(),)), Layout((6, 2), (3,), (RaggedShard((0,), (1, 0, 5)),))
    plan = plan_exchange(source, target, (0,))
    assert [(m.peer, m.numel) for m in plan.sends] == [((0,), 2), ((2,), 10)]
    assert [(m.peer, m.numel) for m in plan.receives] == [((0,), 2), ((1,), 2), ((2,), 2)]


def test_a_pending_axis_that_ends_replicated_reduces_only_what_the_others_leave():
    source = Layout((4, 2), (2, 2), (Partial(), Partial()))
    target = Layout((4, 2), (2, 2), (Replicate(), RaggedShard((0,), (1, 3))))
    for me in coordinates((2, 2)):
        assert all(m.peer[0] == me[0] for m in plan_exchange(source, target, me).sends)


def test_elements_that_follow_one_another_make_one_run():
    source = Layout((5, 3), (3,), (RaggedShard((0, 1), (4, 0, 11)),))
    replicated = Layout((5, 3), (3,), (Replicate(),))
    (_, to_other) = plan_exchange(source, replicated, (0,)).sends[:2]
    assert len(to_other.boxes) == 2
    assert to_other.run() == (0, 4)
    by_columns = Layout((5, 3), (3,), (Shard(1),))
    assert all(m.run() is None for m in plan_exchange(replicated, by_columns, (0,)).sends)


def test_a_box_of_one_row_is_a_run_whatever_its_row_stride():
    row = Box((2, 0), (1, 3), 6, (100, 1))
    assert Message((0,), (row,)).run() == (6, 3)


def test_replicas_serve_themselves():
    source = Layout((6,), (2, 2), (Replicate(), RaggedShard((0,), (2, 4))))
    target = Layout((6,), (2, 2), (Replicate(), Replicate()))
    for me in coordinates((2, 2)):
        assert {m.peer[0] for m in plan_exchange(source, target, me).receives} == {me[0]}
        assert local_boxes(target, me)[0].size == (6,)
