"""`RaggedTensor`: a DTensor whose layout holds a `RaggedShard`, on stock torch.

Level 6 of the data flow. It wraps local tensors and knows how to come from and go to plain tensors, other
layouts (`exchange.py` moves the data), files (torch's distributed checkpoint asks it for its boxes) and
compiled graphs. What an operator does to the local tensors is decided in `ragged_ops.py` and the files that
register rules there; an operator without a rule raises and names itself.

[Note: dispatch] torch gives a DTensor subclass precedence over DTensor itself, so every operator with at
least one RaggedTensor argument arrives in `RaggedTensor.__torch_dispatch__`, in whatever position it stands,
and stock DTensor's rules never see a RaggedShard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, overload
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import shardkit.ragged_reduce
import shardkit.ragged_views  # noqa: F401  these two register their rules
from shardkit import _torch, ragged_ops
from shardkit._torch import DTensorSpec, OpOverload, local_of, make_spec, meta_of, new_dtensor, spec_of
from shardkit.boxes import Box, local_boxes, local_part, local_shape
from shardkit.exchange import Transfer, scatter, traced_transfer, transfer
from shardkit.placement import RaggedShard, contiguous_stride
from shardkit.specs import ThisMesh, coordinate_of, interned_spec, layout_of, same_placements


class RaggedTensor(DTensor):
    """A tensor cut into uneven pieces along a mesh axis, one local tensor `(units_local, *suffix)` a rank.

    Create it with `from_local` or `shardkit.distribute_tensor`. Stock optimizers, gradient clipping,
    GradScaler, torch.compile, deepcopy, torch.save and distributed checkpoints work on it; an operator that
    has no exact rule raises NotImplementedError with its name.
    """

    __slots__: Sequence[str] = []

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        rule = ragged_ops.RULES.get(func) or ragged_ops.find_rule(func)
        return rule(RaggedTensor, func, args, kwargs or {})

    @staticmethod
    def from_local(  # type: ignore[override]
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> RaggedTensor:
        """A RaggedTensor around `local_tensor`, which it shares memory with; differentiable.

        Args:
            local_tensor: this rank's part, contiguous, of shape `(units_local, *suffix)`.
            device_mesh: the mesh; one placement for each of its axes.
            placements: one RaggedShard, the others Shard or Replicate.
            run_check: True copies the first replica over the others on axes that replicate. Collective then.
            shape: global shape; may be left out where the rows alone are cut and no other axis cuts.
            stride: accepted for DTensor's signature; a RaggedTensor is contiguous.
            grad_placements: layout in which the gradient reaches `local_tensor`; as `placements` by default.

        Raises:
            ValueError: if the local tensor is not what these placements give this rank.
        """
        if torch.compiler.is_dynamo_compiling():
            raise NotImplementedError(
                "RaggedTensor.from_local inside torch.compile: a compiled function can take and return a "
                "RaggedTensor, not make one of a plain tensor. Call from_local outside of it."
            )
        placements = tuple(placements)
        size = _global_shape(local_tensor, placements) if shape is None else torch.Size(shape)
        spec = ragged_spec(device_mesh, placements, size, local_tensor.dtype)
        expected = local_shape(layout_of(spec), coordinate_of(device_mesh))
        if tuple(local_tensor.shape) != expected or not local_tensor.is_contiguous():
            raise ValueError(
                f"RaggedTensor.from_local: {placements} of shape {tuple(size)} give this rank a contiguous "
                f"tensor of shape {expected}, got {tuple(local_tensor.shape)} of stride "
                f"{local_tensor.stride()}."
            )
        if stride is not None and tuple(stride) != spec.stride:
            raise ValueError(f"RaggedTensor.from_local: expected stride {spec.stride}, got {tuple(stride)}.")
        if run_check:
            for axis, placement in enumerate(placements):
                if isinstance(placement, Replicate):
                    dist.broadcast(local_tensor.detach(), group=device_mesh.get_group(axis), group_src=0)
        if torch.is_grad_enabled() and local_tensor.requires_grad:
            wanted = spec if grad_placements is None else _with_placements(spec, grad_placements)
            return _FromLocal.apply(local_tensor, spec, wanted)  # type: ignore[no-any-return,no-untyped-call]
        return _wrap_ragged(local_tensor, spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, sharing memory; differentiable, with the gradient expected in the same layout."""
        if torch.is_grad_enabled() and self.requires_grad:
            given = None if grad_placements is None else _with_placements(spec_of(self), grad_placements)
            return _ToLocal.apply(self, given)  # type: ignore[no-any-return,no-untyped-call]
        return local_of(self)

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> DTensor | Redistribution:
        """This tensor in another layout of the same mesh: `shardkit.redistribute`."""
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(
                f"redistribute from {self.device_mesh} to {device_mesh}: only within one mesh."
            )
        if placements is None:
            raise ValueError("redistribute: placements are needed, one for each mesh axis.")
        return redistribute(self, placements, async_op=async_op)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank, gathered into one buffer; differentiable.

        Collective over the mesh: all ranks must call.
        """
        replicated = redistribute(self, [Replicate()] * self.device_mesh.ndim)
        return replicated.to_local(grad_placements=grad_placements)

    @property  # type: ignore[override]
    def data(self) -> RaggedTensor:
        """This tensor without its history, as torch.Tensor.data; assigning replaces the local tensor too."""
        if torch.is_inference_mode_enabled():  # where torch makes no views of other tensors
            with torch.inference_mode(False):
                return self.data
        detached = self.detach()
        assert isinstance(detached, RaggedTensor)
        return detached

    @data.setter
    def data(self, other: RaggedTensor) -> None:
        if not isinstance(other, RaggedTensor):
            raise TypeError(
                f"data: expected a RaggedTensor, got {type(other).__name__}. Distribute it first."
            )
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        _torch.replace_parts(self, local_of(other), spec_of(other))

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"RaggedTensor(local_tensor={local_of(self)}, device_mesh={self.device_mesh}, "
            f"placements={self.placements})"
        )

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], flatten_spec: object, outer_size: object, outer_stride: object
    ) -> RaggedTensor:
        """The way back from a traced graph; DTensor's own would give a DTensor."""
        plain = _torch.unflatten_dtensor(inner_tensors, flatten_spec, outer_size, outer_stride)
        return _wrap_ragged(local_of(plain), spec_of(plain), plain.requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """Where torch.compile looks for a traced graph on disk: nowhere.

        DTensor's own answer is equal on ranks that hold another number of rows, so that one would run what
        another compiled; and a graph that was not traced here has no routes here. What inductor made of the
        local tensors is still found again.
        """
        return uuid4().hex

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """One item a box; torch's distributed checkpoint would take this rank's part for the whole."""
        properties = TensorProperties.create_from_tensor(local_of(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where this rank's boxes lie in the global tensor; one without elements is one chunk of every rank,
        as a tensor of no chunk would not be in the checkpoint.
        """
        if not self.numel():
            return [ChunkStorageMetadata(torch.Size([0] * self.ndim), self.shape)]
        return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The part of the local tensor in the box at `index`, to be read or written in place."""
        if not self.numel():
            return local_of(self).new_empty(self.shape)
        for box in self.boxes():
            if index.offset is None or torch.Size(box.offset) == index.offset:
                return box.view(local_of(self).detach())
        raise ValueError(f"{index.fqn}: no box at {index.offset} on this rank; it holds {self.boxes()}.")

    def boxes(self) -> tuple[Box, ...]:
        """Where the elements of this rank lie in the global tensor, and in the local one."""
        return local_boxes(layout_of(spec_of(self)), coordinate_of(self.device_mesh))


@dataclass(slots=True)
class Redistribution:
    """A redistribution under way, from `redistribute(..., async_op=True)`.

    The tensor it reads must not change before `wait` returns the one in the new layout.
    """

    transfer: Transfer
    spec: DTensorSpec

    def wait(self) -> DTensor:
        """The tensor in its new layout."""
        return _wrap(self.transfer.wait(), self.spec)


@overload
def redistribute(
    tensor: DTensor, placements: Sequence[Placement], *, async_op: Literal[False] = False
) -> DTensor: ...
@overload
def redistribute(
    tensor: DTensor, placements: Sequence[Placement], *, async_op: bool
) -> DTensor | Redistribution: ...
def redistribute(
    tensor: DTensor, placements: Sequence[Placement], *, async_op: bool = False
) -> DTensor | Redistribution:
    """`tensor` in another layout of its mesh; the only way into and out of a ragged one.

    From and to any mix of RaggedShard, Shard and Replicate, and from Partial sums and means, on several axes
    at once. Elements that already lie right stay; Partial to RaggedShard is a reduce-scatter. Differentiable.
    Collective over the mesh: all ranks must call.

    Args:
        tensor: a DTensor, ragged or not.
        placements: one for each mesh axis.
        async_op: True returns a `Redistribution` at once, whose `wait()` gives the tensor. Not
            differentiable, and not inside torch.compile.

    Raises:
        ValueError: if the tensor cannot lie so.
        NotImplementedError: for a Partial target, a Partial source other than a sum or mean, two ragged axes;
            inside torch.compile for a source that is not ragged.
    """
    if torch.compiler.is_dynamo_compiling():  # it takes a method as a whole, and would look into this
        if not isinstance(tensor, RaggedTensor) and any(isinstance(p, RaggedShard) for p in placements):
            raise NotImplementedError(
                "redistribute of a stock DTensor to a ragged layout inside torch.compile: only a "
                "RaggedTensor can be redistributed there. Do it outside of the compiled function."
            )
        return tensor.redistribute(placements=placements, async_op=async_op)
    source = spec_of(tensor)
    target = _with_placements(source, placements)
    if not (_is_ragged(source) or _is_ragged(target)):
        return tensor.redistribute(placements=target.placements, async_op=async_op)
    if async_op:
        if _torch.is_traced(local_of(tensor)):
            raise NotImplementedError(
                "redistribute(async_op=True) inside torch.compile: a graph holds no handle. Leave it out."
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                "redistribute(async_op=True) is not differentiable. Call it under torch.no_grad()."
            )
        return Redistribution(_move(local_of(tensor), source, target), target)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _Redistribute.apply(tensor, target)  # type: ignore[no-any-return,no-untyped-call]
    return _wrap(_move(local_of(tensor), source, target).wait(), target)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """The global `tensor` laid out by `placements`, as torch's function of this name, also raggedly.

    Collective over the mesh, all ranks must call, unless `src_data_rank` is None.

    Args:
        tensor: the global tensor, a leaf. Values are read on the source rank only; on meta nothing is sent.
        device_mesh: the mesh; one placement for each of its axes.
        placements: how to lay it out.
        src_data_rank: place of the source on each mesh axis; None lets every rank cut its own tensor.

    Raises:
        ValueError: if the tensor cannot lie so, is no leaf, or is a DTensor already.
    """
    if not any(isinstance(placement, RaggedShard) for placement in placements):
        return torch.distributed.tensor.distribute_tensor(
            tensor, device_mesh, placements, src_data_rank=src_data_rank
        )
    if isinstance(tensor, DTensor) or not tensor.is_leaf:
        raise ValueError(
            f"distribute_tensor: expected a plain leaf tensor, got {type(tensor).__name__} with is_leaf="
            f"{tensor.is_leaf}. For a DTensor use shardkit.redistribute, in a graph RaggedTensor.from_local."
        )
    spec = ragged_spec(device_mesh, tuple(placements), tensor.shape, tensor.dtype)
    layout, me, full = layout_of(spec), coordinate_of(device_mesh), tensor.detach()
    if src_data_rank is None or full.is_meta:
        local = local_part(full if full.is_meta else full.to(device_mesh.device_type), layout, me)
    else:
        root = (src_data_rank,) * device_mesh.ndim
        local = scatter(full, layout, device_mesh, root, torch.device(device_mesh.device_type))
    return _wrap_ragged(local, spec, tensor.requires_grad)


def ragged_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The checked layout record of a RaggedTensor, one object for equal arguments.

    Operators compare the records of their operands by identity first, so a parameter, its gradient and its
    optimizer state are seen to lie alike at once.
    """
    return _checked_spec(ThisMesh(mesh), placements, shape, dtype)


@lru_cache(maxsize=65536)
def _checked_spec(
    mesh: ThisMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    for placement in placements:
        if not isinstance(placement, RaggedShard | Replicate) and type(placement) is not Shard:
            raise NotImplementedError(
                f"{placement} next to a RaggedShard in {placements}: only Shard and Replicate can be. "
                "Reduce a Partial with shardkit.redistribute."
            )
    require_own_dispatch(mesh.mesh)
    spec = interned_spec(mesh, placements, shape, dtype)
    layout_of(spec).check(coordinate_of(mesh.mesh))
    return spec


@cache
def require_own_dispatch(mesh: DeviceMesh) -> None:
    """Raise on a torch whose C++ runs DTensor's own rules on its subclasses too, as 2.11 does."""
    replicate = tuple(Replicate() for _ in range(mesh.ndim))
    spec = make_spec(mesh, replicate, torch.Size((0,)), (1,), torch.float32)
    probe = new_dtensor(RaggedTensor, torch.empty(0), spec, requires_grad=False)
    if type(probe.detach()) is not RaggedTensor:
        raise NotImplementedError(
            f"ragged layouts need a torch that lets a DTensor subclass dispatch, as 2.13 does; this is "
            f"{torch.__version__}. Use Shard(0), the default placement, or a newer torch."
        )


def _move(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> Transfer:
    """Start the transfer; a tensor that already lies right is its own result."""
    beside = any(isinstance(placement, Shard) for placement in source.placements)
    if same_placements(source.placements, target.placements) and not (_is_ragged(source) and beside):
        return Transfer([], lambda: local)  # else only here, maybe: other ranks of a Shard have other units
    if _torch.is_traced(local):
        moved = traced_transfer(local, layout_of(source), layout_of(target), source.mesh)
        return Transfer([], lambda: moved)
    return transfer(local, layout_of(source), layout_of(target), source.mesh)


def _with_placements(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    """The record of the same tensor in another layout, checked."""
    meta = meta_of(spec)
    wanted = tuple(
        Shard(p.dim + len(meta.shape)) if type(p) is Shard and p.dim < 0 else p for p in placements
    )
    if any(isinstance(p, RaggedShard) for p in wanted):
        return ragged_spec(spec.mesh, wanted, meta.shape, meta.dtype)
    if any(isinstance(p, Partial) for p in wanted) and wanted != spec.placements:
        raise NotImplementedError(f"redistribute to {wanted}: a Partial can be a source, not a target.")
    made = make_spec(spec.mesh, wanted, meta.shape, contiguous_stride(meta.shape), meta.dtype)
    layout_of(made).check(coordinate_of(spec.mesh))
    return made


def _is_ragged(spec: DTensorSpec) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in spec.placements)


def _wrap(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """A RaggedTensor or a stock DTensor, as the layout asks."""
    kind = RaggedTensor if _is_ragged(spec) else DTensor
    return new_dtensor(kind, local, spec, requires_grad=requires_grad)


def _wrap_ragged(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> RaggedTensor:
    made = new_dtensor(RaggedTensor, local, spec, requires_grad=requires_grad)
    assert isinstance(made, RaggedTensor)
    return made


def _global_shape(local: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Size:
    """The shape that needs no telling: rows cut raggedly, nothing else cut."""
    ragged = [p for p in placements if isinstance(p, RaggedShard)]
    if len(ragged) != 1 or ragged[0].dims != (0,) or any(isinstance(p, Shard) for p in placements):
        raise ValueError(f"RaggedTensor.from_local: {placements} leave the global shape open. Pass shape=.")
    return torch.Size((sum(ragged[0].local_units), *local.shape[1:]))


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: torch.Tensor, spec: DTensorSpec, grad_spec: DTensorSpec) -> RaggedTensor:  # type: ignore[no-untyped-def]
        ctx.grad_spec = grad_spec
        return _wrap_ragged(local.view_as(local), spec, local.requires_grad)

    @staticmethod
    def backward(ctx, grad: DTensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[no-untyped-def]
        return redistribute(grad, ctx.grad_spec.placements).to_local(), None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: RaggedTensor, grad_spec: DTensorSpec | None) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.spec, ctx.grad_spec = spec_of(tensor), grad_spec
        return local_of(tensor).view_as(local_of(tensor))

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[DTensor, None]:  # type: ignore[no-untyped-def]
        if ctx.grad_spec is None:
            return _wrap(grad.contiguous(), ctx.spec), None
        return redistribute(_wrap(grad.contiguous(), ctx.grad_spec), ctx.spec.placements), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: DTensor, target: DTensorSpec) -> DTensor:  # type: ignore[no-untyped-def]
        ctx.source = spec_of(tensor)
        moved = _move(local_of(tensor), ctx.source, target).wait()
        moved = moved.view_as(moved) if moved is local_of(tensor) else moved
        return _wrap(moved, target, tensor.requires_grad)

    @staticmethod
    def backward(ctx, grad: DTensor) -> tuple[DTensor, None]:  # type: ignore[no-untyped-def]
        """The gradient of a pending sum is the same on all its ranks."""
        placements = [Replicate() if isinstance(p, Partial) else p for p in ctx.source.placements]
        return redistribute(grad, placements), None


torch.serialization.add_safe_globals([RaggedTensor])
_torch.register_foreach_type(RaggedTensor)
