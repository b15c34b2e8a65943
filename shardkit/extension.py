"""The all-gather extension of tensor subclasses: what travels in place of a shard, and where in a row.

Level 7 of the data flow: pure. A local tensor whose class defines `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, or on which they were set, is *extended*. What the first gives, any number of tensors
of any dtypes, is packed as bytes into one row a rank; what the ranks sent is joined along the sharded dim for
the second. Every rank says once what it sends, so a `GatherPlan` is made from the same facts, and fails with
the same error, everywhere.

    w (384, 4) in blocks of 128 rows, as int8 codes with a float32 scale a block, over 2 ranks

    row of rank 0   | codes (256, 4)       | scales (2,) |         codes  (384, 4)
    row of rank 1   | codes (128, 4) | scales (1,) |           ->  scales (3,)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardkit.layout import ALIGN, Segment


class Extended(Protocol):
    """A local tensor with the two functions of the extension."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh, *more: object) -> tuple[Sequence[Tensor], object]:
        """What to gather in place of this shard, and what `fsdp_post_all_gather` shall know of it."""

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: object,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]] | None:
        """The gathered parameter and what to free with it; later, nothing: the same is written to `out`."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor that a rank sends for a parameter; a scalar counts as one row."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the row."""
        return math.prod(self.shape) * self.dtype.itemsize


RankInputs = tuple[tuple[InputSpec, ...], ...]  # what one rank sends: its inputs, parameter by parameter


@dataclass(frozen=True, slots=True)
class ExtendedParam:
    """What a plan needs to know of a parameter."""

    name: str
    dim: int  # along which the ranks' inputs are joined
    size: int  # of the unsharded parameter in that dim
    padded_shape: tuple[int, ...] | None  # of every rank's shard with its padding; None where it is ragged


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The ranks' inputs joined. `numel` counts padding, which `shape` leaves out; segments count bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Where the inputs of a bucket's parameters lie in a row, and how the gathered rows become outputs."""

    row_bytes: int
    offsets: tuple[int, ...]  # of this rank's inputs in its row, bytes
    outputs: tuple[tuple[OutputSpec, ...], ...]  # by parameter


EXTENSION_NAMES = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_extension(name: str, local: Tensor) -> bool:
    """Whether a local tensor says itself what to gather.

    Raises:
        ValueError: it has only one of the two functions.
    """
    has_pre, has_post = (hasattr(local, name) for name in EXTENSION_NAMES)
    if has_pre is not has_post:
        there, missing = ("pre", "post") if has_pre else ("post", "pre")
        raise ValueError(
            f"param {name!r}: its {type(local).__name__} has fsdp_{there}_all_gather and no "
            f"fsdp_{missing}_all_gather. Define both, or neither."
        )
    return has_pre


def refuse_pieces(names: Sequence[str]) -> NoReturn:
    """Refuse `reshard_after_forward=n`: a piece of the rows means nothing by itself."""
    raise NotImplementedError(
        f"param {names[0]!r}: with fsdp_pre_all_gather, reshard_after_forward cannot be a number of ranks "
        f"(parameters {list(names)}). Pass True or False."
    )


def describe_inputs(inputs: RankInputs) -> str:
    """One line that every rank can send to the others."""
    return json.dumps([[(str(spec.dtype), spec.shape) for spec in param] for param in inputs])


def read_inputs(line: str) -> RankInputs:
    """The inverse of `describe_inputs`."""
    return tuple(
        tuple(InputSpec(getattr(torch, dtype.removeprefix("torch.")), tuple(shape)) for dtype, shape in param)
        for param in json.loads(line)
    )


def plan_gather(params: Sequence[ExtendedParam], of_ranks: Sequence[RankInputs], rank: int) -> GatherPlan:
    """Place what every rank sends.

    Raises:
        ValueError: ranks send tensors for a parameter that cannot be joined, or an uneven one without its
            padding. The same on all ranks.
    """
    for index, param in enumerate(params):
        _check_inputs(param, [inputs[index] for inputs in of_ranks])
    offsets = [_offsets(inputs) for inputs in of_ranks]
    row_bytes = max(ends[-1] for ends in offsets)
    outputs, num_before = [], 0
    for index, param in enumerate(params):
        num_inputs = len(of_ranks[0][index])
        outputs.append(
            tuple(
                _output(
                    param,
                    [inputs[index][k] for inputs in of_ranks],
                    [starts[num_before + k] for starts in offsets],
                    row_bytes,
                )
                for k in range(num_inputs)
            )
        )
        num_before += num_inputs
    return GatherPlan(row_bytes, offsets[rank][:-1], tuple(outputs))


def _check_inputs(param: ExtendedParam, of_ranks: Sequence[tuple[InputSpec, ...]]) -> None:
    num_ranks, padded = len(of_ranks), param.padded_shape
    if padded is not None and param.size % num_ranks:
        unpadded = [r for r, specs in enumerate(of_ranks) if any(spec.shape != padded for spec in specs)]
        if unpadded:
            raise ValueError(
                f"param {param.name!r}: its {param.size} rows are uneven over {num_ranks} ranks, so "
                f"fsdp_pre_all_gather must return all-gather inputs with the padded sharded size {padded} on "
                f"every rank, got {_shapes(of_ranks[unpadded[0]])} on rank {unpadded[0]}. Pad them there; "
                "fsdp_post_all_gather gets the rows without the padding."
            )
    first = [_joinable(param, spec) for spec in of_ranks[0]]
    for rank, specs in enumerate(of_ranks):
        if [_joinable(param, spec) for spec in specs] != first:
            along = f"dim {param.dim} only" if padded is None else "nothing"
            raise ValueError(
                f"param {param.name!r}: fsdp_pre_all_gather returned {_shapes(specs)} on rank {rank} and "
                f"{_shapes(of_ranks[0])} on rank 0. Return as many tensors, of the same dtypes, with shapes "
                f"that differ in {along}, on every rank."
            )


def _joinable(param: ExtendedParam, spec: InputSpec) -> tuple[object, ...]:
    """What must be equal on all ranks."""
    dim = _dim_of(param, spec)
    sent = spec.shape if param.padded_shape is not None else (*spec.shape[:dim], -1, *spec.shape[dim + 1 :])
    return (spec.dtype, sent)


def _dim_of(param: ExtendedParam, spec: InputSpec) -> int:
    """Flattened inputs have no more than their rows."""
    return param.dim if param.dim < len(spec.shape) else 0


def _shapes(specs: Sequence[InputSpec]) -> str:
    return ", ".join(f"{spec.dtype} {spec.shape}" for spec in specs) or "nothing"


def _offsets(inputs: RankInputs) -> tuple[int, ...]:
    """The start of every input in a rank's row, and the row's end; all aligned."""
    sizes = [-(-spec.nbytes // ALIGN) * ALIGN for param in inputs for spec in param]
    return tuple(accumulate(sizes, initial=0))


def _output(
    param: ExtendedParam, of_ranks: Sequence[InputSpec], offsets: Sequence[int], row_bytes: int
) -> OutputSpec:
    """Ranks next to one another that send the same shape from the same offset make one segment."""
    spec = of_ranks[0]
    dim = _dim_of(param, spec)
    before, num_rows = math.prod(spec.shape[:dim]), sum(spec.shape[dim] for spec in of_ranks)
    joined_bytes = sum(spec.nbytes for spec in of_ranks) // max(before, 1)  # of one step in the dims before
    segments, first, start = [], 0, 0
    for (same, offset), group in groupby(zip(of_ranks, offsets, strict=True)):
        num_ranks = len(list(group))
        if same.nbytes:
            piece = same.nbytes // before
            segments.append(
                Segment(
                    size=(num_ranks, before, piece),
                    param_offset=start,
                    param_strides=(piece, joined_bytes, 1),
                    rows_offset=first * row_bytes + offset,
                    rows_strides=(row_bytes, piece, 1),
                )
            )
            start += num_ranks * piece
        first += num_ranks
    if param.padded_shape is not None and spec.shape[dim] == param.padded_shape[param.dim]:
        num_rows = min(num_rows, param.size)
    shape = (*spec.shape[:dim], num_rows, *spec.shape[dim + 1 :])
    return OutputSpec(spec.dtype, shape, joined_bytes * before // spec.dtype.itemsize, tuple(segments))
