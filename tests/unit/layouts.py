"""Random layouts and what each rank holds in them by torch's own chunking: the oracle of the layout tests."""

from __future__ import annotations

import math
from itertools import pairwise, product

import torch
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from shardkit.boxes import Layout, local_shape
from shardkit.placement import RaggedShard

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
mesh_shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All places on a mesh."""
    return list(product(*map(range, mesh_shape)))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Layout:
    """Any valid placements, at most one ragged, its units drawn for the tensor that the others leave."""
    ragged_axis = draw(st.sampled_from([None, *range(len(mesh_shape))]))
    placements: list[Placement] = []
    for axis in range(len(mesh_shape)):
        options: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
        if shape:
            dims = st.integers(0, len(shape) - 1)
            options.append(st.builds(Shard, dims))
            if ragged_axis is None:
                options.append(
                    st.builds(lambda d, f: _StridedShard(d, split_factor=f), dims, st.integers(2, 3))
                )
        placements.append(Replicate() if axis == ragged_axis else draw(st.one_of(options)))
    if ragged_axis is None:
        return Layout(shape, mesh_shape, tuple(placements))
    num_dims = draw(st.integers(0, len(shape)))
    units: dict[tuple[int, ...], tuple[int, ...]] = {}
    plain = Layout(shape, mesh_shape, tuple(placements))
    for coordinate in coordinates(mesh_shape):
        place = coordinate[:ragged_axis] + coordinate[ragged_axis + 1 :]
        total = math.prod(local_shape(plain, coordinate)[:num_dims])
        alike = [held for held in units.values() if sum(held) == total]
        if place not in units:
            units[place] = alike[0] if alike else _draw_units(draw, total, mesh_shape[ragged_axis])
    placements[ragged_axis] = RaggedShard(tuple(range(num_dims)), next(iter(units.values())))
    return Layout(shape, mesh_shape, tuple(placements), tuple(sorted(units.items())))


def _strided(dim: int, split_factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=split_factor)


def _draw_units(draw: st.DrawFn, total: int, num_ranks: int) -> tuple[int, ...]:
    edges = [0, *sorted(draw(st.integers(0, total)) for _ in range(num_ranks - 1)), total]
    return tuple(b - a for a, b in pairwise(edges))


def held(full: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The local tensor by torch's chunking, then a flat slice for the ragged axis."""
    local = full
    for axis, placement in enumerate(layout.placements):
        size, rank = layout.mesh_shape[axis], coordinate[axis]
        if isinstance(placement, Shard):
            local = _chunks(local, size, placement.dim)[rank]
        elif isinstance(placement, _StridedShard):
            parts = _chunks(local, placement.split_factor, placement.dim)
            local = torch.cat([_chunks(p, size, placement.dim)[rank] for p in parts], placement.dim)
    ragged = layout.ragged_at(coordinate)
    if ragged is None or layout.ragged_axis is None:
        return local.contiguous()
    rank, suffix = coordinate[layout.ragged_axis], local.shape[len(ragged.dims) :]
    start, units = sum(ragged.local_units[:rank]) * math.prod(suffix), ragged.local_units[rank]
    return local.reshape(-1)[start : start + units * math.prod(suffix)].view(units, *suffix).contiguous()


def _chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    parts = list(torch.chunk(tensor, count, dim)) if tensor.shape[dim] else []
    return parts + [tensor.narrow(dim, 0, 0)] * (count - len(parts))
