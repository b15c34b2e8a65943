"""Where a parameter lies, read from it once: the bridge from tensors to the pure files beside this one.

A parameter may be a RaggedTensor, a DTensor with Shard, Replicate or torch's _StridedShard on any number of
mesh axes, or a plain tensor, which this rank then holds alone. Axes that only replicate are left out, unless
replicas share the work (`replicas.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardkit._torch import local_of, spec_of, wait_async
from shardkit.boxes import Layout, local_shape
from shardkit.exchange import with_all_units
from shardkit.optim.pieces import cut_axes
from shardkit.placement import RaggedShard, contiguous_stride
from shardkit.ragged import RaggedTensor
from shardkit.specs import coordinate_of, layout_of, same_layout


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter's layout and the ranks that cut it.

    Args:
        name: fqn, or its number where the optimizer got no names.
        layout: of the parameter.
        me: this rank's place on the mesh.
        axes: the mesh axes whose ranks hold different parts.
        ranks: the global ranks along these axes; the plan's indices are places in this tuple.
        mesh: None for a plain tensor.
        device: of the local tensor.
    """

    name: str
    layout: Layout
    me: tuple[int, ...]
    axes: tuple[int, ...]
    ranks: tuple[int, ...]
    mesh: DeviceMesh | None
    device: torch.device

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of the axes that cut."""
        return () if self.mesh is None else tuple(self.mesh.get_group(axis) for axis in self.axes)

    def over_replicas(self) -> Placed:
        """The same parameter, with the ranks that hold copies of its parts among its ranks."""
        axes = tuple(axis for axis, size in enumerate(self.layout.mesh_shape) if size > 1)
        if axes == self.axes:
            return self
        return replace(self, axes=axes, ranks=_ranks_along(self.mesh, self.layout, axes, self.me))

    def zeros(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of zeros on the same ranks, laid out by `layout`."""
        local = torch.zeros(local_shape(layout, self.me), dtype=dtype, device=device)
        if self.mesh is None:
            return local
        is_ragged = any(isinstance(placement, RaggedShard) for placement in layout.placements)
        shape, kind = torch.Size(layout.shape), RaggedTensor if is_ragged else DTensor
        return kind.from_local(
            local, self.mesh, layout.placements, shape=shape, stride=contiguous_stride(shape)
        )


def placed(name: str, param: Tensor) -> Placed:
    """Read where `param` lies.

    Collective over the mesh where a ragged parameter is tensor-parallel as well: all ranks must call.

    Raises:
        TypeError: it does not hold real numbers.
        ValueError: it is sparse, its local part is not contiguous, or a sum is still pending.
    """
    if not param.is_floating_point():
        raise TypeError(f"param {name!r}: expected real numbers, got {param.dtype}. Leave it out.")
    if param.is_sparse:
        raise ValueError(f"param {name!r}: it is sparse. Call to_dense() on it, or leave it out.")
    if not isinstance(param, DTensor):
        check_contiguous(name, param)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return Placed(
            name, Layout(tuple(param.shape), (1,), (Replicate(),)), (0,), (), (rank,), None, param.device
        )
    if any(isinstance(placement, Partial) for placement in param.placements):
        raise ValueError(
            f"param {name!r}: a sum is still pending in {param.placements}. Redistribute it before the "
            "optimizer is built."
        )
    check_contiguous(name, local_of(param))
    mesh = param.device_mesh
    layout, me = with_all_units(layout_of(spec_of(param)), mesh), coordinate_of(mesh)
    axes = cut_axes(layout)
    ranks = _ranks_along(mesh, layout, axes, me)
    return Placed(name, layout, me, axes, ranks, mesh, local_of(param).device)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory, without history."""
    if isinstance(tensor, DTensor):
        return local_of(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def local_grad(name: str, param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part of the gradient, contiguous, in a dtype or in its own.

    Raises:
        TypeError: its values do not all fit into that.
        ValueError: the gradient lies otherwise than the parameter, or is sparse.
    """
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise ValueError(f"param {name!r}: its gradient is sparse. Build its module with sparse=False.")
    if not lie_alike(grad, param):
        raise ValueError(
            f"param {name!r}: expected its gradient to lie as it does, {drawn(param)}, got {drawn(grad)}. "
            "Redistribute the gradient before step()."
        )
    own = wait_async(local(grad)).contiguous()
    if dtype is None or grad.dtype == dtype:
        return own
    if torch.promote_types(grad.dtype, dtype) != dtype:
        raise TypeError(
            f"param {name!r}: it is {param.dtype} and its gradient {grad.dtype}, which its state would round "
            f"to {dtype}. Keep the parameter in {grad.dtype}, or cast the gradient before step()."
        )
    return own.to(dtype)


def lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape and every rank holds the same part of both."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return same_layout(spec_of(a), spec_of(b))
    return isinstance(a, DTensor) == isinstance(b, DTensor) and a.shape == b.shape


def drawn(tensor: Tensor) -> str:
    """Shape and placements, for messages."""
    placements = f" placed {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)}{placements}"


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose elements are not in order, which views of its parts rely on."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"param {name!r} is not contiguous: it has strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}. Call .contiguous() on it before it is sharded."
        )


def planned(name: str, layout: Layout) -> Placed:
    """A parameter on ranks that need not exist, as the first of them sees it."""
    me, axes = (0,) * len(layout.mesh_shape), cut_axes(layout)
    ranks = _ranks_along(None, layout, axes, me)
    return Placed(name, layout, me, axes, ranks, None, torch.device("meta"))


def _ranks_along(
    mesh: DeviceMesh | None, layout: Layout, axes: tuple[int, ...], me: tuple[int, ...]
) -> tuple[int, ...]:
    """The global ranks at `coordinates_on(layout, axes, me)`; without a mesh they are numbered from zero."""
    if mesh is None:
        return tuple(range(math.prod(layout.mesh_shape[axis] for axis in axes)))
    along = tuple(slice(None) if axis in axes else place for axis, place in enumerate(me))
    return tuple(mesh.mesh[along].flatten().tolist())
