"""Every private torch API that shardkit touches: one small function each, with the reason it is needed.

Level 0 of the data flow. A new torch release is tried here first.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
import torch.distributed._functional_collectives as functional
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["DTensorSpec", "OpOverload", "TensorMeta"]

# ---- DTensor ----------------------------------------------------------------------------------------------

# The local tensor itself (`to_local` may return a view that records a gradient) and the layout record (mesh,
# placements, global shape, stride, dtype). Getters in C: `map(local_of, tensors)` is the hot path of foreach.
local_of: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")

# new_dtensor(cls, local, spec, requires_grad=False). Calling `cls(...)` also runs an `__init__` that dynamo
# wraps, which takes twice the time.
new_dtensor: Callable[..., DTensor] = torch.Tensor._dtensor__new__


def replace_parts(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Give a DTensor another local tensor; torch's `tensor.data = ...` changes the outer shell alone."""
    tensor._local_tensor, tensor._spec = local, spec


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    """The layout record that a DTensor holds; torch has no public constructor for uneven locals."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def meta_of(spec: DTensorSpec) -> TensorMeta:
    """Global shape, stride and dtype, which every DTensor's spec has; its own type allows None."""
    assert spec.tensor_meta is not None
    return spec.tensor_meta


def strided_shard(placement: Placement) -> tuple[int, int] | None:
    """(dim, split factor) of torch's _StridedShard, which FSDP2 puts over a TP Shard of the same dim."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def norm_partial(norm_type: float) -> Placement:
    """A pending p-norm; the public Partial could only add the ranks' norms."""
    return _NormPartial(norm_type)


def op_name(func: OpOverload) -> str:
    """The operator without its overload, such as aten::add_."""
    return str(func._schema.name)


def op_arguments(func: OpOverload) -> list[torch.Argument]:
    """Names, defaults and aliasing of an operator's arguments; only its schema tells."""
    return list(func._schema.arguments)


def all_reduce(tensor: torch.Tensor, reduce_op: str, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """All-reduce over one mesh axis by the functional collective, which torch.compile can trace."""
    reduced: torch.Tensor = functional.all_reduce(tensor, reduce_op, (mesh, axis))
    return functional.wait_tensor(reduced)  # type: ignore[no-any-return,no-untyped-call]


def unflatten_dtensor(inner: object, flatten_spec: object, size: object, stride: object) -> DTensor:
    """What DTensor makes of the pieces that a traced graph gives back; their form is torch's own."""
    rebuild = DTensor.__tensor_unflatten__
    return rebuild(inner, flatten_spec, size, stride)  # type: ignore[no-any-return,no-untyped-call]


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a compiler holds a stand-in for the tensor, so that no message can be sent."""
    return isinstance(tensor, FakeTensor) or torch.compiler.is_compiling()


def register_foreach_type(cls: type[DTensor]) -> None:
    """Let stock optimizers and clip_grad_norm_ choose foreach by default; their lists hold exact types."""
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_utils

    for supported in (of_optimizers, of_utils):
        if cls not in supported:
            supported.append(cls)
