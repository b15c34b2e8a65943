"""Join: the gradients of a tiny unit in one call, where they follow one another as rows do.

Level 5 of the data flow: decides and moves. Takes the layout of a reduce buffer; gives what lies between the
tails of its rows. Only ragged layouts lie so. To cut every gradient where a row ends takes calls for every
piece; up to `MAX_BYTES` it is cheaper to join them uncut, and to copy that once more to between the tails.

    two ranks     rows  | w w w | flags | w b . | flags |     joined  | w w w | w b . |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from shardkit._torch import join_flat
from shardkit.layout import BucketSpec, Layout, RaggedSource

MAX_BYTES = 16 * 1024  # of a bucket's gradients

_is_sparse = attrgetter("is_sparse")


@dataclass(frozen=True, slots=True)
class Join:
    """What follows one another in the rows: all gradients of a bucket, and the plan's padding."""

    keys: tuple[int, ...]  # of parameters by index, and of padding below zero
    padding: Mapping[int, Tensor]  # zeros
    num_params: int
    size: tuple[int, int]  # (num_ranks, elements of a row before its tail)

    def takes(self, grads: Mapping[int, Tensor]) -> bool:
        """Whether all gradients are there, as elements that one call can read."""
        return len(grads) == self.num_params and not any(map(_is_sparse, grads.values()))

    def join(self, grads: Mapping[int, Tensor]) -> Tensor:
        """(num_ranks, elements of a row before its tail), a copy."""
        pieces = {**grads, **self.padding}
        return join_flat([pieces[key] for key in self.keys]).view(self.size)


def join_of(layout: Layout, trainable: Sequence[int], spec: BucketSpec) -> Join | None:
    """How to join the gradients; None where rows hold them interleaved, or but for some, or are large.

    The copy lives for a moment beside the rows, in place of the gradients.
    """
    rows_bytes = layout.unsharded_numel * spec.compute_dtype.itemsize
    is_whole = len(trainable) == len(spec.layout.slots)  # else all that is frozen would be padding
    if not isinstance(layout.source, RaggedSource) or not is_whole or rows_bytes > MAX_BYTES:
        return None
    keys: list[int] = []
    padding: dict[int, Tensor] = {}
    end = 0

    def pad_to(start: int) -> None:
        if start > end:
            keys.append(~len(padding))
            padding[keys[-1]] = torch.zeros(start - end, dtype=spec.compute_dtype, device=spec.device)

    slots = [(layout.slots[index], index) for index in trainable]
    for slot, index in sorted(slots, key=lambda pair: (pair[0].unsharded_offset, pair[0].numel)):
        pad_to(slot.unsharded_offset)
        keys.append(index)
        end = slot.unsharded_offset + slot.numel
    pad_to(layout.unsharded_numel)
    return Join(tuple(keys), padding, len(trainable), (layout.num_ranks, layout.source.plan.shard_numel))
