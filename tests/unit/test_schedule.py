"""The order of gathers, what is freed when, and the predicted peak, by hand-computed examples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardkit.schedule import (
    Boundary,
    BucketBytes,
    ForwardOrder,
    Step,
    Tape,
    UnitBytes,
    grads_to_sweep,
    peak_bytes,
    reshards_after_forward,
)

# ---------------------------------------------------------------- order


def prefetches(runs: list[int], backwards: list[int]) -> list[int | None]:
    order = ForwardOrder()
    for unit in runs:
        order.record(unit)
    return [order.prefetch_for(unit) for unit in backwards]


def test_backward_prefetches_the_unit_that_ran_before() -> None:
    assert prefetches([0, 1, 2], [2, 1, 0]) == [1, 0, None]


def test_a_unit_that_ran_twice_is_consumed_from_its_last_run() -> None:
    assert prefetches([0, 1, 2, 1], [1, 2, 1, 0]) == [2, 1, 0, None]


def test_a_second_backward_over_one_graph_prefetches_nothing() -> None:
    assert prefetches([0, 1], [1, 0, 1]) == [0, None, None]


def test_backward_may_leave_out_units() -> None:
    assert prefetches([0, 1, 2], [2, 0]) == [1, None]


def test_a_unit_that_never_ran_prefetches_nothing() -> None:
    assert prefetches([0], [7]) == [None]


def test_a_cleared_order_starts_anew() -> None:
    order = ForwardOrder()
    order.record(0)
    order.record(1)
    order.clear()
    order.record(1)
    assert order.prefetch_for(1) is None


# ---------------------------------------------------------------- what backward passes over

BEGIN_0, END_0, BEGIN_1, END_1, BEGIN_2, END_2 = [Boundary(n, end) for n in range(3) for end in (False, True)]


def recorded(*boundaries: Boundary) -> Tape:
    tape = Tape()
    for boundary in boundaries:
        tape.record(boundary)
    return tape


def passed(steps: list[Step]) -> list[Boundary]:
    return [boundary for boundary, _ in steps if boundary is not None]


def test_a_backward_that_visits_all_passes_nothing_over() -> None:
    tape = recorded(BEGIN_0, END_0, BEGIN_1, END_1)
    for boundary in (END_1, BEGIN_1, END_0, BEGIN_0):
        assert tape.visit(boundary) == [Step(None)]
    assert tape.finish() == []


def test_a_backward_takes_part_in_what_it_passes_over() -> None:
    tape = recorded(BEGIN_0, END_0, BEGIN_1, END_1, BEGIN_2, END_2)
    for _ in range(2):  # a second backward over the graph begins from the end again
        assert passed(tape.visit(END_1)) == [END_2, BEGIN_2]
        assert passed(tape.visit(BEGIN_1)) == []
        assert passed(tape.finish()) == [END_0, BEGIN_0]
        assert tape.finish() == []
        tape.rewind()


def test_an_outer_unit_whose_output_is_an_inner_ones_begins_first() -> None:
    tape = recorded(BEGIN_1, BEGIN_0, END_0, END_1)
    assert passed(tape.visit(END_0)) == [END_1]
    assert tape.visit(END_1) == []
    assert passed(tape.finish()) == [BEGIN_0, BEGIN_1]


def test_the_runs_of_a_unit_are_undone_from_the_last() -> None:
    tape = recorded(BEGIN_0, END_0, BEGIN_1, END_1, BEGIN_0, END_0)
    assert passed(tape.visit(END_0)) == []
    assert passed(tape.visit(END_0)) == [BEGIN_0, END_1, BEGIN_1]


class Checkpoint:
    """Stands for the hook of an activation checkpoint."""


def in_two_checkpoints() -> tuple[Tape, list[Checkpoint]]:
    """Units 0 and 1 run in one checkpoint and 1 in another; 0 gets no gradient there."""
    tape, checkpoints = Tape(), [Checkpoint(), Checkpoint()]
    early, late = checkpoints
    tape.rerun_later(0, [early])
    tape.rerun_later(1, [None, early])
    tape.record(BEGIN_1, [early])
    tape.record(END_1, [early])
    tape.rerun_later(1, [None, late])
    tape.record(BEGIN_1, [late])
    tape.record(END_1, [late])
    tape.record(END_2)
    return tape, checkpoints


def test_all_of_a_checkpoint_is_known_wherever_backward_comes_into_it() -> None:
    tape, _keep = in_two_checkpoints()
    (end_2, outside), (_, region) = tape.visit(END_1)
    assert (end_2, outside) == (END_2, None)
    assert region is not None
    assert region.units == [1]


def test_checkpoints_in_one_another_are_one() -> None:
    tape, outer, inner, other = Tape(), Checkpoint(), Checkpoint(), Checkpoint()
    tape.rerun_later(0, [outer, inner])
    tape.rerun_later(1, [outer, None])
    tape.rerun_later(2, [outer, other])
    (_, region), *rest = tape.rerun(0)
    assert rest == []
    assert region is not None
    assert region.units == [0, 1, 2]


def test_a_checkpoint_that_runs_again_passes_over_what_came_later() -> None:
    tape, _keep = in_two_checkpoints()
    *steps, (boundary, region) = tape.rerun(0)
    assert passed(steps) == [END_2, END_1, BEGIN_1]
    assert boundary is None
    assert region is not None
    assert region.units == [0, 1]
    assert passed(tape.finish()) == [END_1, BEGIN_1]


# ---------------------------------------------------------------- freeing


@pytest.mark.parametrize(
    ("setting", "is_root", "with_grad", "pinned", "reshards"),
    [
        (None, False, True, False, True),
        (None, True, True, False, False),  # backward needs the root first
        (None, True, False, False, True),  # but without backward nothing may outlive the forward
        (True, True, True, False, True),
        (False, False, True, False, False),
        (False, False, False, False, True),
        (False, False, False, True, False),  # the user called unshard()
        (True, False, False, True, True),
        (2, True, True, False, True),
    ],
)
def test_reshards_after_forward(
    setting: bool | int | None, is_root: bool, with_grad: bool, pinned: bool, reshards: bool
) -> None:
    found = reshards_after_forward(setting, is_root=is_root, with_grad=with_grad, pinned=pinned)
    assert found is reshards


def test_the_smallest_gradients_wait_up_to_the_budget() -> None:
    assert grads_to_sweep([50, 3, 2, 90], budget_bytes=10) == {1, 2}
    assert grads_to_sweep([50, 3, 2, 90], budget_bytes=4) == {2}
    assert grads_to_sweep([5, 5], budget_bytes=5) == {0}


# ---------------------------------------------------------------- peak

# four ranks, parameters of 4, a largest gradient of 2
SHARD0 = UnitBytes((BucketBytes(shard=1, transit=4, unsharded=4, rows=4, row=1, scratch=1, grad=1),), loose=2)
IN_PLACE = replace(SHARD0, buckets=(replace(SHARD0.buckets[0], transit=0),))
ROOT = UnitBytes((), num_inner=2)


def test_one_unit_peaks_where_its_gradient_meets_the_rows() -> None:
    assert peak_bytes([SHARD0]) == 1 + 4 + 2 + 4


def test_a_gathered_unit_is_copied_out_of_its_rows() -> None:
    frozen = UnitBytes((BucketBytes(shard=1, transit=4, unsharded=4),))
    assert peak_bytes([frozen]) == 1 + 4 + 4
    assert peak_bytes([replace(frozen, buckets=(replace(frozen.buckets[0], transit=0),))]) == 1 + 4


def test_the_example_of_the_docstring() -> None:
    without_scratch = replace(SHARD0, buckets=(replace(SHARD0.buckets[0], scratch=0),))
    assert peak_bytes([without_scratch, without_scratch, ROOT]) == 16


def test_six_units_peak_at_the_last_but_one_of_backward() -> None:
    # 6 shards, 4 reduced gradients of which one is in flight (rows 4, scratch 1), 4 + 4 gathered, a gradient
    for unit in (SHARD0, IN_PLACE):
        assert peak_bytes([*[unit] * 6, replace(ROOT, num_inner=6)]) == 6 + 4 + (4 + 1) + (4 + 4) + 2


def test_a_gradient_that_needs_no_rows_is_one_of_them() -> None:
    (bucket,) = IN_PLACE.buckets
    direct = replace(IN_PLACE, loose=0, first=3)
    assert peak_bytes([direct]) == 1 + 4 + 4
    # it is there before the reduction of the unit before is over: 2 shards, gathered 4
    assert peak_bytes([direct, direct, ROOT]) == 2 + 4 + (4 + 1 + 1) + 3
    # of the root's gradients one of 3 comes last, when what is inside is being reduced
    root = UnitBytes((replace(bucket, late=3),), kept=4, num_inner=1)
    assert peak_bytes([direct, root]) == 2 + 4 + 1 + (4 + 1 + 1) + 3


def test_a_second_reduction_in_flight_keeps_its_rows() -> None:
    # 6 shards, 4 reduced gradients of which two are in flight, 4 + 4 gathered, a gradient
    six = [*[SHARD0] * 6, replace(ROOT, num_inner=6)]
    assert peak_bytes(six, max_reductions=2) == 6 + 4 + 2 * (4 + 1) + (4 + 4) + 2


def test_a_root_that_is_kept_stays_to_the_end_with_its_rows() -> None:
    root = replace(IN_PLACE, kept=4, num_inner=2)
    inside = peak_bytes([IN_PLACE, IN_PLACE, ROOT])
    # its shard, its parameters, its rows
    assert peak_bytes([IN_PLACE, IN_PLACE, root]) == inside + 1 + 4 + 4


def test_a_unit_that_is_kept_is_not_gathered_twice() -> None:
    kept = replace(SHARD0, kept=4)
    # forward ends with both gathered; the second's backward adds its rows and a gradient
    assert peak_bytes([kept, kept, ROOT]) == 2 + 4 + 4 + 4 + 2


def test_a_kept_piece_is_given_up_when_its_unit_is_gathered_again() -> None:
    piece = replace(IN_PLACE, kept=2)
    # forward: 1 shard, 4 gathered, a piece copied out of them; backward: 4 gathered from the piece, and so on
    assert peak_bytes([piece]) == 1 + 4 + max(2, 2 + 4)
    big_piece = replace(IN_PLACE, kept=3, loose=0, buckets=(BucketBytes(shard=1, transit=0, unsharded=4),))
    assert peak_bytes([big_piece]) == 1 + 4 + 3


def test_a_row_in_another_dtype_lives_beside_the_gradient() -> None:
    bucket = BucketBytes(shard=8, transit=0, unsharded=4, rows=4, row=4, grad=8, casts=True)
    # after the parameters have been freed: rows and row, and the gradient cast from it
    assert peak_bytes([UnitBytes((bucket,))]) == 8 + 4 + 4 + 8
    assert peak_bytes([UnitBytes((replace(bucket, casts=False, grad=4),))]) == 8 + 4 + 4


def test_rows_of_one_rank_become_the_gradient() -> None:
    bucket = BucketBytes(shard=4, transit=0, unsharded=4, rows=4, row=0, grad=4)
    assert peak_bytes([UnitBytes((bucket,), loose=2)]) == 4 + 4 + 4 + 2


def test_buckets_of_a_unit_are_reduced_one_after_the_other() -> None:
    bucket = BucketBytes(shard=0, transit=0, unsharded=0, rows=4, row=3, grad=1)
    both = UnitBytes((bucket, bucket))
    # rows of both, the row of one; with two in flight, the rows of both
    assert peak_bytes([both]) == 4 + 4 + 3
    assert peak_bytes([both], max_reductions=2) == 4 + 4 + 3 + 3


def test_nothing_holds_nothing() -> None:
    assert peak_bytes([]) == peak_bytes([UnitBytes(())]) == 0
