"""Where the tensors of an all-gather extension lie in a row, and how rows are joined, without processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from shardkit.extension import (
    ExtendedParam,
    GatherPlan,
    InputSpec,
    RankInputs,
    describe_inputs,
    plan_gather,
    read_inputs,
)
from shardkit.params import move_to_device


def inputs_of(tensors: Sequence[Tensor]) -> RankInputs:
    return (tuple(InputSpec(t.dtype, tuple(t.shape)) for t in tensors),)


def gathered(param: ExtendedParam, of_ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Pack every rank's tensors into its row, and join the rows as the plan says."""
    sent = [inputs_of(tensors) for tensors in of_ranks]
    plans = [plan_gather([param], sent, rank) for rank in range(len(of_ranks))]
    rows = torch.cat([row_of(plan, tensors) for plan, tensors in zip(plans, of_ranks, strict=True)])
    outputs = []
    for spec in plans[0].outputs[0]:
        flat = torch.empty(spec.numel, dtype=spec.dtype)
        for s in spec.segments:
            place = flat.view(torch.uint8).as_strided(s.size, s.param_strides, s.param_offset)
            place.copy_(rows.as_strided(s.size, s.rows_strides, s.rows_offset))
        outputs.append(flat[: torch.Size(spec.shape).numel()].view(spec.shape))
    return outputs


def row_of(plan: GatherPlan, tensors: Sequence[Tensor]) -> Tensor:
    row = torch.full((plan.row_bytes,), 255, dtype=torch.uint8)
    for tensor, offset in zip(tensors, plan.offsets, strict=True):
        row[offset : offset + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    return row


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_even_parts_are_joined_along_the_sharded_dim(dim: int, dtype: torch.dtype) -> None:
    whole = torch.arange(6 * 6 * 6).view(6, 6, 6).to(dtype)
    parts = [part.contiguous() for part in whole.chunk(3, dim)]
    (joined,) = gathered(ExtendedParam("w", dim, 6, tuple(parts[0].shape)), [[part] for part in parts])
    assert torch.equal(joined, whole)


def test_rows_come_without_the_padding() -> None:
    whole = torch.arange(15.0).view(5, 3)
    padded = torch.nn.functional.pad(whole, (0, 0, 0, 4), value=-1.0).split(3)
    (joined,) = gathered(ExtendedParam("w", 0, 5, (3, 3)), [[part] for part in padded])
    assert torch.equal(joined, whole)


def test_ragged_rows_and_their_scales_are_joined_in_rank_order() -> None:
    codes, scales = torch.arange(40, dtype=torch.int8).view(10, 4), torch.arange(5.0)
    of_ranks = [[codes[a:b], scales[a // 2 : b // 2]] for a, b in [(0, 2), (2, 4), (4, 4), (4, 10)]]
    joined = gathered(ExtendedParam("w", 0, 10, None), of_ranks)
    assert torch.equal(joined[0], codes)
    assert torch.equal(joined[1], scales)


def test_ranks_that_send_the_same_shapes_are_one_copy() -> None:
    sent = [inputs_of([torch.empty(4, 8), torch.empty(1)])] * 1000
    plan = plan_gather([ExtendedParam("w", 0, 4000, (4, 8))], sent, 7)
    assert plan.row_bytes == 128 + 16
    assert [len(spec.segments) for spec in plan.outputs[0]] == [1, 1]


def test_inputs_survive_the_way_to_another_rank() -> None:
    sent = (*inputs_of([torch.empty(3, 4, dtype=torch.float8_e4m3fn), torch.empty(2)]), ())
    assert read_inputs(describe_inputs(sent)) == sent


@pytest.mark.parametrize(
    ("size", "padded", "of_ranks", "words"),
    [
        (
            5,
            (3, 2),
            [[(3, 2)], [(2, 2)]],
            "padded sharded size (3, 2) on every rank, got .* (2, 2) on rank 1",
        ),
        (5, (3, 2), [[(3, 2), (1,)], [(3, 2), (1,)]], "padded sharded size"),
        (6, (3, 2), [[(3, 2)], [(2, 2)]], "differ in nothing"),
        (6, (3, 2), [[(3, 2)], [(3, 2), (1,)]], "as many tensors"),
        (6, None, [[(4, 2)], [(2, 3)]], "differ in dim 0 only"),
    ],
)
def test_parts_that_do_not_join_are_refused_by_name(
    size: int, padded: tuple[int, ...] | None, of_ranks: list[list[tuple[int, ...]]], words: str
) -> None:
    sent = [inputs_of([torch.empty(shape) for shape in shapes]) for shapes in of_ranks]
    words = words.replace("(", r"\(").replace(")", r"\)")
    for rank in range(2):
        with pytest.raises(ValueError, match=f"param 'layers.0.w': .*{words}"):
            plan_gather([ExtendedParam("layers.0.w", 0, size, padded)], sent, rank)


def test_a_wrapper_moves_with_the_tensors_inside_it() -> None:
    param = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    move_to_device([("w", param)], torch.device("meta"))
    assert isinstance(param, nn.Parameter) and param.requires_grad
    assert param.a.is_meta and param.b.is_meta
