"""Joined gradients lie between the tails of the rows as their segments do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from shardkit.join import MAX_BYTES, Join, join_of
from shardkit.layout import (
    ALIGN,
    BucketSpec,
    Layout,
    RaggedParam,
    RaggedSource,
    ShardedShape,
    interleaved_layout,
    ragged_layout,
    reduce_layout,
)
from shardkit.mesh import DataAxes
from shardkit.plan import TensorSpec, plan_buckets
from tests.unit.test_layout import NOTHING, Laid, ragged, rows_of

CPU = torch.device("cpu")


def joined_of(layout: Layout, indices: list[int], reduced: Layout) -> Join | None:
    dtype = torch.int64  # that of the numbered elements
    spec = BucketSpec(layout, NO_AXES, dtype, dtype, dtype, CPU, CPU)
    return join_of(reduced, indices, spec)


NO_AXES = DataAxes.__new__(DataAxes)  # what joins has no need of a mesh


@settings(deadline=None)
@given(ragged())
def test_joined_gradients_lie_where_their_segments_lie(case: Laid) -> None:
    indices = list(range(len(case.params)))
    whole, reduced = case.layouts[0], case.reduced(indices).layouts[0]
    join = joined_of(whole, indices, reduced)
    assert (join is not None) == (whole.unsharded_numel * 8 <= MAX_BYTES)
    if join is None:
        return
    grads = dict(enumerate(case.params))
    assert join.takes(grads)
    expected = rows_of(reduced, case.params).view(reduced.num_ranks, -1)[:, : join.size[1]]
    assert torch.equal(join.join(grads), expected.where(expected != NOTHING, 0))


@settings(deadline=None)
@given(ragged())
def test_gradients_of_some_parameters_are_not_joined(case: Laid) -> None:
    indices = list(range(1, len(case.params)))
    assert joined_of(case.layouts[0], indices, case.reduced(indices).layouts[0]) is None


def test_an_empty_parameter_may_share_its_start_with_another() -> None:
    specs = [TensorSpec("one", 1), TensorSpec("empty", 0), TensorSpec("two", 2)]
    (plan,) = plan_buckets(specs, 1, unit_numel=ALIGN, align_numel=ALIGN, max_buckets=1)
    plan = replace(plan, starts={"one": 0, "empty": 0, "two": ALIGN})
    source = RaggedSource(plan, tuple(RaggedParam(spec.name, (spec.numel,), (spec.numel,)) for spec in specs))
    layout = ragged_layout(source, 0, range(3))
    join = joined_of(layout, [0, 1, 2], reduce_layout(layout, [0, 1, 2]).rows)
    assert join is not None
    joined = join.join({0: torch.ones(1), 1: torch.ones(0), 2: torch.ones(2)})
    assert joined.flatten().nonzero().flatten().tolist() == [0, ALIGN, ALIGN + 1]


def test_interleaved_gradients_are_not_joined() -> None:
    shapes = [ShardedShape("w", (ALIGN, 4), 0)]
    layout = interleaved_layout(shapes, 2, 0)
    assert joined_of(layout, [0], interleaved_layout(shapes, 2, 0, tail_numel=2)) is None


@pytest.mark.parametrize("missing", ["one is not there", "one is sparse"])
def test_what_one_call_cannot_read_is_not_taken(missing: str) -> None:
    join = Join((0, 1), {}, 2, (1, 8))
    grads = {0: torch.ones(4), 1: torch.ones(4)}
    assert join.takes(grads)
    if missing == "one is not there":
        del grads[1]
    else:
        grads[1] = grads[1].to_sparse()
    assert not join.takes(grads)
