"""The layouts that the ragged tests walk, by world size: empty ranks, cuts inside rows, stacks, two axes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit.placement import RaggedShard


class Case(NamedTuple):
    """A tensor's shape, the mesh's shape, and how it lies there."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]


CASES = {
    1: [
        Case((5, 3), (1,), (RaggedShard((0,), (5,)),)),
        Case((5, 3), (1,), (RaggedShard((0, 1), (15,)),)),
    ],
    2: [
        Case((5, 3), (2,), (RaggedShard((0,), (1, 4)),)),
        Case((5, 3), (2,), (RaggedShard((0,), (0, 5), 5),)),
        Case((5, 3), (2,), (RaggedShard((0, 1), (4, 11)),)),
        Case((2, 3, 4), (2,), (RaggedShard((0, 1), (4, 2)),)),
    ],
    3: [
        Case((5, 3), (3,), (RaggedShard((0,), (1, 4, 0)),)),
        Case((5, 3), (3,), (RaggedShard((0, 1), (4, 0, 11)),)),
        Case((5, 3), (3,), (RaggedShard((), (0, 1, 0)),)),
        Case((2, 3, 4), (3,), (RaggedShard((0, 1, 2), (5, 17, 2)),)),
        Case((7,), (3,), (RaggedShard((0,), (0, 6, 1)),)),
        Case((1,), (3,), (RaggedShard((0,), (0, 1, 0)),)),
        Case((), (3,), (RaggedShard((), (0, 1, 0)),)),
    ],
    4: [
        Case((5, 3), (4,), (RaggedShard((0,), (1, 0, 3, 1)),)),
        Case((6, 4), (2, 2), (Replicate(), RaggedShard((0,), (1, 5)))),
        Case((6, 4), (2, 2), (RaggedShard((0,), (1, 2)), Shard(0))),
        Case((6, 4), (2, 2), (RaggedShard((0,), (6, 0)), Shard(1))),
        Case((6, 4), (2, 2), (RaggedShard((0, 1), (5, 7)), Shard(1))),
        Case((6, 4), (2, 2), (RaggedShard((0,), (1, 5)), Replicate())),
        Case((2, 3, 4), (1, 2, 2), (Replicate(), RaggedShard((0, 1), (5, 1)), Shard(2))),
    ],
}


def mesh_of(case: Case) -> DeviceMesh:
    """A mesh of the case's shape over all ranks."""
    names = ("replicate", "shard", "tp")[-len(case.mesh_shape) :]
    return init_device_mesh("cpu", case.mesh_shape, mesh_dim_names=names)


def values(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Small non-zero integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(1, 9, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (magnitude * sign).to(dtype)


def full(result: object) -> object:
    """A result with its DTensors gathered."""
    if isinstance(result, DTensor):
        return result.full_tensor()
    if isinstance(result, tuple | list):
        return [full(item) for item in result]
    return result


def assert_same(got: object, expected: object, what: str) -> None:
    """Equal values, shapes and dtypes; NaN equals NaN."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{what}: got {type(got).__name__}"
        assert got.dtype == expected.dtype, f"{what}: {got.dtype} instead of {expected.dtype}"
        assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
        same = torch.equal(got.nan_to_num(7e7), expected.nan_to_num(7e7))
        assert same, f"{what}: got {got}, expected {expected}"
    elif isinstance(expected, tuple | list):
        assert isinstance(got, tuple | list) and len(got) == len(expected), f"{what}: {got}"
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b, what)
    else:
        assert got == expected, f"{what}: got {got}, expected {expected}"
