"""Reading and rewriting the layout record that a DTensor carries (torch's DTensorSpec).

Level 5 of the data flow: between the pure `Layout` of `boxes.py`, which knows no process, and the tensors of
`ragged.py`. Everything is a fact read from the record; nothing here communicates.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from shardkit._torch import DTensorSpec, make_spec, meta_of
from shardkit.boxes import Layout
from shardkit.placement import RaggedShard, contiguous_stride


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's place on `mesh`."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not part of {mesh}, so it holds no part of the tensor.")
    return tuple(coordinate)


@lru_cache(maxsize=65536)
def layout_of(spec: DTensorSpec) -> Layout:
    """The record without the mesh's processes."""
    return Layout(tuple(meta_of(spec).shape), tuple(spec.mesh.shape), spec.placements)


def spec_with(
    spec: DTensorSpec,
    dtype: torch.dtype,
    shape: tuple[int, ...] | None = None,
    placements: tuple[Placement, ...] | None = None,
) -> DTensorSpec:
    """The record of a tensor on the same mesh that differs in dtype, and in shape or placements if given."""
    size = meta_of(spec).shape if shape is None else torch.Size(shape)
    return interned_spec(ThisMesh(spec.mesh), placements or spec.placements, size, dtype)


class ThisMesh:
    """A mesh as a cache key, by identity: an equal one whose groups are gone must not be found for it."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __hash__(self) -> int:
        return id(self.mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThisMesh) and self.mesh is other.mesh


@lru_cache(maxsize=65536)
def interned_spec(
    mesh: ThisMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The one record of a contiguous tensor laid out so; operators compare records by identity first."""
    return make_spec(mesh.mesh, placements, shape, contiguous_stride(shape), dtype)


def ragged_of(spec: DTensorSpec) -> tuple[int, RaggedShard]:
    """The ragged mesh axis and its placement."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard):
            return axis, placement
    raise AssertionError(f"{spec.placements} hold no RaggedShard")


def sharded_axes(spec: DTensorSpec) -> list[int]:
    """Mesh axes whose ranks hold different parts."""
    return [axis for axis, placement in enumerate(spec.placements) if not isinstance(placement, Replicate)]


def same_layout(a: DTensorSpec, b: DTensorSpec) -> bool:
    """Whether two tensors of one shape lie alike on every rank, whatever their dtypes and blocks."""
    if a is b:
        return True
    if meta_of(a).shape != meta_of(b).shape or a.mesh != b.mesh:
        return False
    return a.placements == b.placements or same_placements(a.placements, b.placements)


def same_placements(a: tuple[Placement, ...], b: tuple[Placement, ...]) -> bool:
    """Whether a tensor that goes from placements `a` to `b` stays as it is."""
    return all(p.same_layout(q) if isinstance(p, RaggedShard) else p == q for p, q in zip(a, b, strict=True))
