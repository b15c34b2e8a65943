"""Whether replicas share the work on pieces or each do all of it.

Pure. Ranks that differ only along mesh axes that replicate hold the same parts: of hybrid sharding, or of
plain data parallelism. With 2 replicas of 2 shards and two matrices a and b, which both shards cut:

    redundant    ranks 0 and 1 work on a and b, and so do ranks 2 and 3      nothing passes between replicas
    shared       one of the four works on a, another on b: the parts come from the worker's own replica, and
                 the results go to the holders in both

Sharing divides the operations by the number of replicas that share, and every result goes to each of these:
for many replicas that is too much, so blocks of them may share. What is least for the busiest rank is taken:
its operations, and FLOPS_A_BYTE for each byte that it sends or receives. In any case each replica ends with
the same bits, if its gradients were the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from shardkit.optim.pieces import Piece, Share, Shares
from shardkit.optim.planning import StepPlan, size_text

Replicas = Literal["auto", "redundant", "shared"]
Copies = tuple[tuple[int, ...], ...]  # for each rank of one replica, the ranks of all that hold the same
FLOPS_A_BYTE = 12_500  # 500 TFLOP/s of bfloat16 products against 40 GB/s between machines


class Cost(NamedTuple):
    """What a step asks of the busiest rank."""

    flops: float
    nbytes: int

    def __str__(self) -> str:
        return f"{self.flops:.2e} FLOPs and {size_text(self.nbytes)}"

    @property
    def total(self) -> float:
        """In floating-point operations."""
        return self.flops + FLOPS_A_BYTE * self.nbytes


def cost_of(plans: Sequence[StepPlan]) -> Cost:
    """The busiest rank of each of some plans that follow one another."""
    flops, nbytes = 0.0, 0
    for plan in plans:
        flops += max(plan.loads)
        nbytes += max(*plan.sent, *plan.received)
    return Cost(flops, nbytes)


def note_of(num_sharing: int | None, shared: Cost, redundant: Cost) -> str:
    """What was chosen, against what, for the table."""
    if num_sharing is None:
        return f"each replica does all of the work: at most {redundant} a rank; shared, {shared}"
    return f"replicas share, {num_sharing} ranks: at most {shared} a rank; each doing all of it, {redundant}"


def shared_piece(piece: Piece, copies: Copies) -> Piece:
    """A piece as all replicas hold it, from one as a single replica does.

    Args:
        copies: over the ranks that share.
    """
    fields = tuple(replace(field, shares=_shared(field.shares, copies)) for field in piece.fields)
    return replace(piece, fields=fields)


@lru_cache(maxsize=1024)
def _shared(shares: Shares, copies: Copies) -> Shares:
    return Shares(sorted(Share(holder, share.boxes) for share in shares for holder in copies[share.holder]))


@lru_cache(maxsize=1024)
def copies_of(mesh_shape: tuple[int, ...], axes: tuple[int, ...], wider: tuple[int, ...]) -> Copies:
    """For each index along `axes` of a mesh, the indices along `wider` that agree with it there.

    mesh (2, 3), axes (1,), wider (0, 1)  ->  ((0, 3), (1, 4), (2, 5))
    """
    copies: dict[tuple[int, ...], list[int]] = {}
    for index, place in enumerate(product(*(range(mesh_shape[axis]) for axis in wider))):
        own = tuple(at for axis, at in zip(wider, place, strict=True) if axis in axes)
        copies.setdefault(own, []).append(index)
    return tuple(map(tuple, copies.values()))


@lru_cache(maxsize=1024)
def in_block(copies: Copies, size: int) -> Copies:
    """Those among the first `size` ranks: the same for every block of as many, counted from its start."""
    return tuple(tuple(index for index in alike if index < size) for alike in copies)


def block_sizes(copies: Collection[Copies]) -> list[int]:
    """How many neighbouring ranks can share: those with the same number of whole replicas of a parameter.

    Args:
        copies: what `copies_of` gave for each parameter; all over the same ranks.

    Returns:
        In ascending order, all ranks the last; two replicas or more of each parameter that has them.
    """
    groups = [alike for of_param in copies for alike in of_param]
    num_ranks = 1 + max(map(max, groups))
    if max(map(len, groups)) == 1:
        return []

    def is_spread(alike: tuple[int, ...], size: int) -> bool:
        count = Counter(index // size for index in alike)
        is_even = len(count) == num_ranks // size and len(set(count.values())) == 1
        return is_even and (count[0] > 1 or len(alike) == 1)

    sizes = (size for size in range(1, num_ranks + 1) if num_ranks % size == 0)
    return [size for size in sizes if all(is_spread(alike, size) for alike in groups)]
