"""GradBuffer: unsharded gradients on their way into one reduction.

Level 8 of the data flow: holds. Every gradient is written once into the rows that a reduce-scatter will
consume, with the cast to the reduce dtype, as soon as autograd has it, and is freed. Without gradient sync
the rows simply stay, and the next micro-batch adds to them in the reduce dtype. Behind each row is a tail of
flags, summed by the same reduction, that tells every rank which parameters were used somewhere and which were
not.

    row of rank r   | its chunk of every trainable parameter | used: 1 1 0 | unused: 0 0 1 |

Two flags a parameter, not one: a sum of ones in bfloat16 stops at 256, but a positive sum stays positive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from shardkit.layout import BucketSpec, Layout, reduce_layout
from shardkit.sharded_param import ShardedParam


class GradBuffer:
    """The rows of one bucket's gradients, from the first gradient to the reduction."""

    def __init__(self, params: Sequence[ShardedParam], spec: BucketSpec) -> None:
        self.params, self.spec = params, spec
        self.comm: ReduceScatter | None = None  # the user's, which allocates the rows too
        self.partial: Tensor | None = (
            None  # (row_numel,), reduced over the shard axis, not yet over the replicas
        )
        self.trainable: tuple[int, ...] = ()  # indices of the parameters in the rows
        self.layout: Layout | None = None
        self._rows: Tensor | None = None  # (num_ranks * row_numel,)
        self._used: set[int] = set()
        self.took_all = False  # whether the rows taken last had a gradient of every parameter

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has been added since the last reduction."""
        return self._rows is None

    def add(self, index: int, grad: Tensor) -> None:
        """Write, or add, the gradient of parameter `index` (its unsharded shape) into the rows."""
        param = self.params[index]
        with torch.no_grad():
            local = param.sharding.local_grad(grad)
            local = (local.to_dense() if local.is_sparse else local).contiguous()
            rows = self._allocate() if self._rows is None else self._rows
            if index not in self.trainable:
                raise RuntimeError(
                    f"param {param.name!r}: requires_grad was switched on between micro-batches without "
                    "gradient sync, whose buffer has no place for it. Switch it after a synced backward."
                )
            for part, target in self._parts(rows, index, local):
                target.add_(part) if index in self._used else target.copy_(part)
        self._used.add(index)

    def sweep(self) -> None:
        """Take every `.grad` that is still on a gathered parameter: pipelining and manual code set them
        without hooks.
        """
        for index, param in enumerate(self.params):
            if param.unsharded is not None and (grad := param.unsharded.grad) is not None:
                param.unsharded.grad = None
                self.add(index, grad)

    def take(self) -> Tensor:
        """The rows (num_ranks * row_numel,) with flags written and unused parameters zero; the buffer is
        empty again.
        """
        rows = self._allocate() if self._rows is None else self._rows
        layout = self.layout
        assert layout is not None
        with torch.no_grad():
            for index in self.trainable:
                if index not in self._used:
                    for _, target in self._parts(rows, index, None):
                        target.zero_()
            used = [float(index in self._used) for index in self.trainable]
            flags = torch.tensor(used + [1.0 - flag for flag in used], dtype=rows.dtype, device=rows.device)
            rows.view(layout.num_ranks, -1)[:, layout.row_numel - layout.tail_numel :].copy_(flags)
        self.took_all = len(self._used) == len(self.trainable)
        self._rows = None
        self._used = set()
        return rows

    def drop(self) -> None:
        """Forget what was not reduced: the iteration failed."""
        self._rows = self.partial = None
        self._used = set()

    def _allocate(self) -> Tensor:
        trainable = tuple(index for index, param in enumerate(self.params) if param.sharded.requires_grad)
        if self.layout is None or trainable != self.trainable:
            self.trainable = trainable
            self.layout = reduce_layout(self.spec.layout, trainable, 2 * len(trainable))
        layout, spec = self.layout, self.spec
        if self.comm is not None:
            rows = self.comm.allocate((layout.numel,), dtype=spec.reduce_dtype, device=spec.device)
        else:
            rows = torch.empty(layout.numel, dtype=spec.reduce_dtype, device=spec.device)
        for gap in layout.gaps:
            rows.as_strided((gap.num_rows, gap.numel), (layout.row_numel, 1), gap.offset).zero_()
        self._rows = rows
        return rows

    def _parts(self, rows: Tensor, index: int, grad: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """(part of the gradient, its place in the rows); without a gradient the places stand for both."""
        assert self.layout is not None
        pairs = []
        for segment in self.layout.slots[self.trainable.index(index)].segments:
            place = rows.as_strided(segment.size, segment.rows_strides, segment.rows_offset)
            if grad is None:
                pairs.append((place, place))
            else:
                offset = grad.storage_offset() + segment.param_offset
                pairs.append((grad.as_strided(segment.size, segment.param_strides, offset), place))
        return pairs
