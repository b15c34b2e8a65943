"""ExtensionGather: local tensors say what to gather, and what to make of it.

Level 9 of the data flow: a `RowGather` without a shard buffer. The shards stay the users' own tensors,
because they are objects with functions (see `extension.py`).

    local  --fsdp_pre_all_gather-->  inputs  --bytes-->  own row  --all_gather-->  rows  --copy-->  outputs
    outputs  --fsdp_post_all_gather-->  gathered parameter         (made the first time, later written again)

Outputs, and what the user names to be freed, stay the same tensors: their storages are resized, because
autograd saved views of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardkit._torch import keep_versions, local_of
from shardkit.agreement import exchange_texts
from shardkit.buffer import FlatBuffer
from shardkit.collectives import Route, has_peers
from shardkit.extension import (
    Extended,
    ExtendedParam,
    GatherPlan,
    InputSpec,
    RankInputs,
    describe_inputs,
    plan_gather,
    read_inputs,
    refuse_pieces,
)
from shardkit.gather import RowGather, gather_rows, new_rows
from shardkit.layout import BucketSpec
from shardkit.placement import contiguous_stride
from shardkit.sharded_param import ShardedParam
from shardkit.streams import Streams


class ExtensionGather(RowGather):
    """Gathers what extended parameters ask for."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        spec: BucketSpec,
        route: Route | None,
        precision: MixedPrecisionPolicy,
    ) -> None:
        self._precision = precision
        super().__init__(params, spec, route)

    def take_in(self, new: Sequence[ShardedParam]) -> None:
        """Accept tensors, and functions, that are new or that the user replaced; all is made anew."""
        if not any(param in new for param in self.params):
            return
        for param in self.params:
            local = param.local.to(self.spec.shard_device)
            param.hold(local.pin_memory() if self.spec.pin_memory and not local.is_pinned() else local)
        self.unsharded, self.tensors = None, []
        self._extensions = [Extension(param, self.spec, self._precision) for param in self.params]
        self._own: RankInputs = ()  # what this rank sends
        self._plan: GatherPlan | None = None  # of what all ranks send, from the first gather on
        self._outputs: list[tuple[Tensor, ...]] = []  # of each parameter
        self._targets: list[Tensor] = []  # their bytes, a tensor a segment of the plan

    def start(self, label: str) -> None:
        """Send what the parameters ask for. Collective over the shard axis."""
        with torch.inference_mode(False), torch.no_grad():
            asked = [extension.ask() for extension in self._extensions]
        own = tuple(
            tuple(InputSpec(tensor.dtype, tuple(tensor.shape) or (1,)) for tensor in inputs)
            for inputs in asked
        )
        if self._plan is None:
            self._plan, self._own = self._agree(own, label), own
        for param, now, before in zip(self.params, own, self._own, strict=True):
            if now != before:
                raise ValueError(
                    f"param {param.name!r}: fsdp_pre_all_gather returned {now}, and {before} at first. "
                    "Return the same dtypes and shapes each time."
                )
        rank, plan = self.spec.layout.rank, self._plan
        numel = self.spec.layout.num_ranks * plan.row_bytes
        self._rows = rows = new_rows(numel, torch.uint8, self.spec.device, self.comm)
        row = rows[rank * plan.row_bytes :][: plan.row_bytes]
        tensors = [tensor for inputs in asked for tensor in inputs]
        for tensor, offset in zip(tensors, plan.offsets, strict=True):
            place = row[offset : offset + tensor.nbytes]
            place.copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
        self.pending = gather_rows(rows, row, self.route, self.comm, label)

    def complete(self) -> None:
        """Wait for the rows, join them, and let the users' functions make the parameters."""
        # what is made here is kept for training; and leaving inference mode switches gradients on
        with torch.inference_mode(False), torch.no_grad():
            super().complete()
            self.tensors = [param.unsharded for param in self.params if param.unsharded is not None]

    def keep_piece(self, streams: Streams, num_ranks: int) -> None:
        """Refuse: a piece of the rows means nothing by itself."""
        refuse_pieces([param.name for param in self.params])

    def _agree(self, own: RankInputs, label: str) -> GatherPlan:
        """Plan what all ranks send. Collective over the shard axis, unless no peers are there to ask."""
        spec, route = self.spec, self.route
        of_ranks = [own] * spec.layout.num_ranks
        if route is not None and len(of_ranks) > 1 and has_peers(route.group, spec.device):
            texts = exchange_texts(describe_inputs(own), route, spec.device, label)
            of_ranks = [read_inputs(text) for text in texts]
        params = [_to_plan(param, len(of_ranks)) for param in self.params]
        return plan_gather(params, of_ranks, spec.layout.rank)

    def _allocate_unsharded(self) -> StorageGroup:
        """The outputs with their bytes, and the bytes of what the user keeps in the gathered parameters."""
        if isinstance(self.unsharded, StorageGroup):
            self.unsharded.allocate()
            return self.unsharded
        assert self._plan is not None
        self.unsharded = group = StorageGroup(self.spec.device)
        for specs in self._plan.outputs:
            buffers = [FlatBuffer(spec.numel, spec.dtype, self.spec.device) for spec in specs]
            group.add([buffer.flat for buffer in buffers])
            pairs = list(zip(buffers, specs, strict=True))
            self._outputs.append(tuple(buffer.tensor(0, spec.shape) for buffer, spec in pairs))
            for buffer, spec in pairs:  # written through tensors of their own, which autograd does not watch
                flat = buffer.tensor(0, (spec.numel,)).view(torch.uint8)
                self._targets += [
                    flat.as_strided(s.size, s.param_strides, s.param_offset) for s in spec.segments
                ]
        return group

    def _copy_out(self, rows: Tensor, unsharded: FlatBuffer) -> None:
        assert self._plan is not None and isinstance(unsharded, StorageGroup)
        segments = [s for specs in self._plan.outputs for spec in specs for s in spec.segments]
        sources = [rows.as_strided(s.size, s.rows_strides, s.rows_offset) for s in segments]
        if sources:
            torch._foreach_copy_(self._targets, sources)
        for extension, outputs in zip(self._extensions, self._outputs, strict=True):
            unsharded.add(extension.receive(outputs))


class Extension:
    """The user's two functions on one parameter, and what goes from the first to the second."""

    def __init__(self, param: ShardedParam, spec: BucketSpec, precision: MixedPrecisionPolicy) -> None:
        self.param, self.spec, self.precision = param, spec, precision
        self._num_args: dict[object, int] = {}  # of the functions seen so far; there is one
        self._metadata: object = None
        self._inner: list[Tensor] = []  # freed with the gathered parameter, which is made of them

    def ask(self) -> Sequence[Tensor]:
        """What `fsdp_pre_all_gather` wants to be gathered."""
        param, local = self.param, self.param.local
        if local.device != self.spec.device and type(local) is not Tensor:
            local = local.to(self.spec.device, non_blocking=True)  # a plain tensor would lose its functions
        extended = cast(Extended, local)
        more = (
            torch.Size(param.shape),
            contiguous_stride(param.shape),
            param.owners[0].module,
            self.precision,
        )
        takes_more = self._count_args(extended) == 5
        asked = extended.fsdp_pre_all_gather(param.axes.shard_mesh, *(more if takes_more else ()))
        if len(asked) != 2 or isinstance(asked[0], Tensor):
            raise TypeError(
                f"param {param.name!r}: expected fsdp_pre_all_gather to return a tuple of tensors and "
                f"metadata, got {asked}. Return (tensor,), None for one tensor without metadata."
            )
        inputs, self._metadata = asked
        return inputs

    def receive(self, outputs: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Let `fsdp_post_all_gather` make or fill the gathered parameter; tensors that shall come and go with
        it from now on.
        """
        param, metadata, dtype = self.param, self._metadata, self.spec.compute_dtype
        post = cast(Extended, param.local).fsdp_post_all_gather
        self._metadata = None
        if param.unsharded is not None:
            out = local_of(param.unsharded) if isinstance(param.unsharded, DTensor) else param.unsharded
            with keep_versions([out, *self._inner]):
                post(outputs, metadata, dtype, out=out)
            return ()
        made = post(outputs, metadata, dtype, out=None)
        if made is None:
            raise TypeError(
                f"param {param.name!r}: fsdp_post_all_gather returned None in the first gather. Return "
                "(tensor, tensors_to_free) where `out` is None."
            )
        tensor, inner = made
        if tuple(tensor.shape) != param.shape:  # rows of a stack, or with padding
            tensor = tensor.as_strided(param.shape, contiguous_stride(param.shape), 0)
        param.make_unsharded(tensor)
        self._inner = list(inner)
        return self._inner

    def _count_args(self, extended: Extended) -> int:
        """Whether the user's function takes the mesh alone, or all that there is to know: 1 or 5."""
        method = extended.fsdp_pre_all_gather
        function = getattr(method, "__func__", method)
        if function not in self._num_args:
            signature = inspect.signature(method)
            if len(signature.parameters) not in (1, 5):
                raise TypeError(
                    f"param {self.param.name!r}: expected fsdp_pre_all_gather(self, mesh) or "
                    "fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy), got "
                    f"fsdp_pre_all_gather{signature}. Take one of these."
                )
            self._num_args[function] = len(signature.parameters)
        return self._num_args[function]


class StorageGroup(FlatBuffer):
    """Storages that come and go together; no elements of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, torch.uint8, device)
        self._members: list[tuple[torch.UntypedStorage, int]] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Take the storages of tensors that are allocated now."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._members += [(storage, storage.nbytes()) for storage in storages]

    def allocate(self) -> None:
        """Bring the bytes back, with unspecified content."""
        for storage, nbytes in self._members:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def free(self) -> None:
        """Give the bytes up; the tensors keep identity and shape."""
        for storage, _ in self._members:
            storage.resize_(0)


def _to_plan(param: ShardedParam, num_ranks: int) -> ExtendedParam:
    if param.plan is not None:
        return ExtendedParam(param.name, 0, param.shape[0], None)
    dim, shape = param.shard_dim, param.shape
    padded = (*shape[:dim], -(-shape[dim] // num_ranks), *shape[dim + 1 :])
    return ExtendedParam(param.name, dim, shape[dim], padded)
