"""What holds for a plan of any tensors on any number of ranks."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import PaddingError
from shardkit.plan import BucketPlan, TensorSpec, plan_bucket, plan_buckets


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[TensorSpec]:
    """Vectors, matrices in blocks of rows, and stacks whose matrices the blocks need not divide."""
    tensors = []
    for index in range(draw(st.integers(0, 8))):
        num_matrices, num_rows, row_numel = (draw(st.integers(1, most)) for most in (3, 40, 30))
        block_rows = draw(st.integers(1, 45))
        tensors.append(
            TensorSpec(
                name=f"w{index}",
                numel=num_matrices * num_rows * row_numel * draw(st.integers(0, 1)),
                block_numel=block_rows * row_numel,
                period_numel=draw(st.sampled_from([None, num_rows * row_numel])),
                row_numel=row_numel,
                required=draw(st.booleans()),
            )
        )
    return tensors


world_sizes = st.one_of(st.integers(1, 70), st.sampled_from([384, 1000, 1024]))
alignments = st.sampled_from([1, 2, 4, 8, 16])
units = st.sampled_from([1, 3, 8, 64])


def assert_layout_is_right(plan: BucketPlan) -> None:
    """By definition, from what each rank says that it holds."""
    assert plan.shard_numel % plan.unit_numel == plan.shard_numel % plan.align_numel == 0
    assert plan.lower_bound_numel <= plan.shard_numel
    held = {name: 0 for name in plan.tensors}
    for rank in range(plan.num_ranks):
        cursor = 0
        for name, (start_in_shard, start_in_tensor, numel) in plan.pieces(rank).items():
            tensor = plan.tensors[name]
            matrix_numel = tensor.period_numel or tensor.numel
            assert start_in_shard >= cursor, "pieces overlap"
            assert start_in_shard % plan.align_numel == 0
            assert start_in_tensor == held[name], "pieces do not continue the tensor"
            assert start_in_tensor % matrix_numel % tensor.block_numel == 0, "a block is cut"
            assert rank * plan.shard_numel + start_in_shard == plan.starts[name] + start_in_tensor
            cursor = start_in_shard + numel
            held[name] += numel
        assert cursor <= plan.shard_numel, "a shard overflows"
    assert held == {name: tensor.numel for name, tensor in plan.tensors.items()}


@given(tensor_lists(), world_sizes, units, alignments)
@settings(deadline=None)
def test_tensors_tile_shards_without_a_cut_block(
    tensors: list[TensorSpec], num_ranks: int, unit_numel: int, align_numel: int
) -> None:
    plan = plan_bucket(
        tensors, num_ranks, unit_numel=unit_numel, align_numel=align_numel, max_padding=math.inf
    )
    assert plan.blocks == {tensor.name: tensor.block_numel for tensor in tensors}
    assert_layout_is_right(plan)


@given(tensor_lists(), world_sizes, alignments, st.sampled_from([None, 0.0, 0.05, 0.5]))
@settings(deadline=None)
def test_granted_blocks_divide_the_wish_and_meet_the_budget(
    tensors: list[TensorSpec], num_ranks: int, align_numel: int, max_padding: float | None
) -> None:
    anywhere = [TensorSpec(tensor.name, tensor.numel) for tensor in tensors]
    least_numel = plan_bucket(anywhere, num_ranks, align_numel=align_numel).shard_numel
    try:
        plan = plan_bucket(tensors, num_ranks, align_numel=align_numel, max_padding=max_padding)
    except PaddingError as error:
        refused = str(error)
        assert any(repr(tensor.name) in refused for tensor in tensors)
        return
    assert_layout_is_right(plan)
    for tensor in tensors:
        granted = plan.blocks[tensor.name]
        wished = min(tensor.block_numel, tensor.period_numel or tensor.numel)
        assert granted == tensor.block_numel or (not tensor.required and wished % granted == 0)
        assert granted % tensor.row_numel == 0
    if max_padding is not None:
        assert plan.shard_numel <= least_numel * (1 + max_padding)


@given(tensor_lists(), world_sizes, alignments)
@settings(deadline=None)
def test_two_buckets_hold_every_tensor_once_and_never_more_than_one_does(
    tensors: list[TensorSpec], num_ranks: int, align_numel: int
) -> None:
    scaled = [
        TensorSpec(t.name, t.numel * 4096, t.block_numel * 4096, (t.period_numel or t.numel) * 4096)
        for t in tensors
    ]
    one = plan_bucket(scaled, num_ranks, align_numel=align_numel, max_padding=math.inf)
    plans = plan_buckets(scaled, num_ranks, align_numel=align_numel, max_padding=math.inf)
    for plan in plans:
        assert_layout_is_right(plan)
    assert sorted(name for plan in plans for name in plan.tensors) == sorted(one.tensors)
    assert plans == (one,) or sum(plan.shard_numel for plan in plans) <= one.shard_numel * 0.995


@given(tensor_lists(), world_sizes)
@settings(deadline=None)
def test_a_plan_depends_on_shapes_and_not_on_names(tensors: list[TensorSpec], num_ranks: int) -> None:
    renamed = [
        TensorSpec(f"layers.7.{t.name}", t.numel, t.block_numel, t.period_numel, t.row_numel, t.required)
        for t in tensors
    ]
    plan, twin = (plan_bucket(specs, num_ranks, max_padding=math.inf) for specs in (tensors, renamed))
    assert list(plan.starts.values()) == list(twin.starts.values())
    assert (plan == twin) == (plan.digest == twin.digest) == (hash(plan) == hash(twin)) == (not tensors)
