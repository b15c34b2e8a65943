"""GradRows: the buffer in which gradients lie row by row, one row a rank, for a reduce-scatter to consume.

Level 10 of the data flow: holds. Every gradient is written once, with the cast to the reduce dtype. Behind
each row is a tail of flags, which say what was used. (Written twice are only the gradients of tiny units in
ragged layouts, where that takes less time: see `join.py`.)

    row of rank r   | its part of every parameter that travels in rows | used: 1 1 0 | unused: 0 0 1 |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from shardkit._torch import ReduceScatter
from shardkit.buffer import FlatBuffer
from shardkit.join import join_of
from shardkit.layout import BucketSpec, Layout, Segment
from shardkit.sharded_param import ShardedParam


class GradRows:
    """Rows of one layout; their bytes come and go, unless they become the gradients."""

    def __init__(self, params: Mapping[int, ShardedParam], layout: Layout, spec: BucketSpec) -> None:
        self._params, self._layout, self._spec = params, layout, spec  # params by index, in slot order
        self._buffer: FlatBuffer | None = None  # of the rows, where they do not become the gradients
        self._rows = torch.empty(0)  # (num_ranks * row_numel,), which what follows are views of
        self._places: dict[int, list[Tensor]] = {}  # of each parameter in the rows, a tensor a segment
        self._gaps: list[Tensor] = []
        self._join = join_of(layout, tuple(params), spec) if _are_plain(params) else None
        self._body_numel = self._join.size[1] if self._join else layout.row_numel - layout.tail_numel
        self._bodies = self._tails = torch.empty(0)  # (num_ranks, numel), what lies before and behind there
        self._has_gaps = True  # that are still to be zeroed
        self._segments = dict(zip(params, [slot.segments for slot in layout.slots], strict=True))
        self._whole = {  # as what a gradient fills its place, all of it in order
            index: segments[0].size
            for index, segments in self._segments.items()
            if params[index].sharding.unsharded is None and _is_whole(segments)
        }

    @property
    def tail_numel(self) -> int:
        """Elements of a row behind the gradients: the flags, at its end, and maybe padding before them."""
        return self._layout.row_numel - self._body_numel

    def allocate(self, comm: ReduceScatter | None) -> Tensor:
        """Bring the bytes, with nothing written yet."""
        layout, spec = self._layout, self._spec
        if comm is not None:
            rows = comm.allocate((layout.numel,), dtype=spec.reduce_dtype, device=spec.device)
        elif layout.num_ranks == 1:  # the rows become the gradients
            rows = torch.empty(layout.numel, dtype=spec.reduce_dtype, device=spec.device)
        elif self._buffer is not None:
            self._buffer.allocate()
            rows = self._buffer.flat
        else:
            self._buffer = FlatBuffer(layout.numel, spec.reduce_dtype, spec.device)
            rows = self._buffer.flat
        if rows is not self._rows:
            self._rows, self._places = rows, {}
            strides = (layout.row_numel, 1)
            self._gaps = [rows.as_strided((g.num_rows, g.numel), strides, g.offset) for g in layout.gaps]
            self._bodies, self._tails = rows.view(layout.num_ranks, -1).tensor_split((self._body_numel,), 1)
        self._has_gaps = True
        return rows

    def join(self, grads: dict[int, Tensor]) -> Tensor | None:
        """All gradients as `write_joined` takes them, with `grads` empty now; None where it does not join."""
        if self._join is None or not self._join.takes(grads):
            return None
        joined = self._join.join(grads)
        grads.clear()
        return joined

    def write_joined(self, joined: Tensor) -> None:
        """Write what `join` gave, the gaps between the gradients included."""
        self._bodies.copy_(joined)
        self._has_gaps = False

    def write(self, grads: Mapping[int, Tensor], used: Collection[int]) -> None:
        """Write gradients (index of the parameter -> its unsharded gradient), or add where `used`."""
        new: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        places_of, whole = self._places, self._whole
        for index, grad in grads.items():
            places, parts = more if index in used else new
            places += places_of.get(index) or self._places_of(index)
            size = whole.get(index)
            if size is not None and grad.is_contiguous():
                parts.append(grad.view(*size))  # a third faster than view(size)
            else:
                parts += self._parts_of(index, grad)
        if new[0]:
            torch._foreach_copy_(*new)
        if more[0]:
            torch._foreach_add_(*more)

    def finish(self, unused: Sequence[int], flags: Tensor) -> None:
        """Write zeros for parameters that had no gradient and into gaps, and the flags (tail_numel,)."""
        empty = list(self._gaps) if self._has_gaps else []
        for index in unused:
            empty += self._places_of(index)
        if empty:
            torch._foreach_zero_(empty)
        self._tails.copy_(flags)

    def free(self) -> None:
        """Give the bytes up, or let go of what lives on elsewhere."""
        if self._buffer is not None and self._rows is self._buffer.flat:
            self._buffer.free()
        else:  # not ours: what is cached must not keep them alive
            self._rows = self._bodies = self._tails = torch.empty(0)
            self._places, self._gaps = {}, []

    def _places_of(self, index: int) -> list[Tensor]:
        """Where the gradient of a parameter goes."""
        if index not in self._places:
            rows, segments = self._rows, self._segments[index]
            self._places[index] = [rows.as_strided(s.size, s.rows_strides, s.rows_offset) for s in segments]
        return self._places[index]

    def _parts_of(self, index: int, grad: Tensor) -> list[Tensor]:
        """The gradient, cut as its places are."""
        segments = self._segments[index]
        local = contiguous_grad(self._params[index], grad)
        if _is_whole(segments):
            return [local.view(segments[0].size)]
        start = local.storage_offset()
        return [local.as_strided(s.size, s.param_strides, start + s.param_offset) for s in segments]


def contiguous_grad(param: ShardedParam, grad: Tensor) -> Tensor:
    """What data parallelism reduces of a gradient, contiguous.

    Collective over the tensor-parallel axis where TP left the gradient in another placement.
    """
    local = grad if param.sharding.unsharded is None else param.sharding.local_grad(grad)
    if local.is_contiguous():  # as a sparse one is not
        return local
    return (local.to_dense() if local.is_sparse else local).contiguous()


def _are_plain(params: Mapping[int, ShardedParam]) -> bool:
    """Whether autograd gives what data parallelism reduces."""
    return all(param.sharding.unsharded is None for param in params.values())


def _is_whole(segments: Sequence[Segment]) -> bool:
    """Whether one copy takes a contiguous gradient from its first element to its last."""
    return len(segments) == 1 and len(segments[0].size) <= 2
