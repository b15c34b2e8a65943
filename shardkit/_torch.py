"""Every private torch API that shardkit touches: one small function each, with the reason.

Level 0 of the data flow. When a torch release moves one of these names, this is the file to change.
Supported: torch >=2.11,<2.15; a new torch is tried here first.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.fsdp._fully_shard._fsdp_collectives as comms
import torch.distributed.tensor._random as dtensor_random
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions, Store
from torch._compile import _disable_dynamo
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem, _get_registry
from torch.distributed._composable_state import _State as State
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import _foreach_supported_types as optimizer_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Types that torch documents, or users must name, without a public home.
__all__ = [
    "AllGather",
    "DTensorSpec",
    "DataParallelMeshInfo",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "OffsetBasedRNGTracker",
    "OpOverload",
    "ReduceScatter",
    "ShardPlacementResult",
    "State",
    "Store",
    "TensorMeta",
]

P = ParamSpec("P")
R = TypeVar("R")

try:
    from torch._library.effects import EffectType
except ImportError:  # older ones may not have it: there inductor may reorder what is independent
    EffectType = None  # type: ignore[assignment, misc]

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult as ShardPlacementResult
except ImportError:  # nor this

    @dataclasses.dataclass
    class ShardPlacementResult:  # type: ignore[no-redef]
        """Where a parameter is sharded, and over which mesh, as torch's own class from 2.12 on."""

        placement: Shard | None
        mesh_info: FSDPMeshInfo


# ---------------------------------------------------------------- meshes


class MeshRoles(NamedTuple):
    """Which dim of a mesh shards and which replicates; None where the mesh has no such dim."""

    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis out of several. No public call does it; torch caches the result, and its group, by name."""
    return mesh._flatten(name)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Slices of one mesh side by side, with their groups: slicing needs the root mesh, which torch hides."""
    return DeviceMesh._concatenate(list(meshes))


def roles_of_mesh_info(info: DataParallelMeshInfo) -> MeshRoles:
    """What torch's mesh infos say; users return them in a ShardPlacementResult, public only by its docs."""
    return MeshRoles(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim)


# ---------------------------------------------------------------- DTensors

# The local tensor itself (`to_local` may return a view that records a gradient) and the layout record (mesh,
# placements, global shape, stride, dtype). Getters in C: `map(local_of, tensors)` is the hot path of foreach.
local_of: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
spec_of: Callable[[Tensor], DTensorSpec] = attrgetter("_spec")

# new_dtensor(cls, local, spec, requires_grad=False); `cls(...)` takes twice the time, as dynamo wraps it.
new_dtensor: Callable[..., DTensor] = torch.Tensor._dtensor__new__


def replace_parts(tensor: Tensor, local: Tensor, spec: DTensorSpec) -> None:
    """Give a DTensor another local tensor, keeping the object that optimizers and users hold.

    torch's `tensor.data = ...` changes the outer shell alone.
    """
    tensor._local_tensor, tensor._spec = local, spec  # type: ignore[attr-defined]


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


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same layout for another dtype."""
    meta = meta_of(spec)
    if meta.dtype == dtype:
        return spec
    return dataclasses.replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def cuts_dim(placement: Placement, dim: int) -> bool:
    """Whether a stock placement divides `dim`; _StridedShard is no Shard in some releases."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def make_strided_shard(dim: int, split_factor: int) -> Placement:
    """Data-parallel rows of a dim that tensor parallelism has cut first: only torch's class says it."""
    return _StridedShard(dim, split_factor=split_factor)


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
    return functional.wait_tensor(reduced)  # type: ignore[no-any-return]


def unflatten_dtensor(inner: object, flatten_spec: object, size: object, stride: object) -> DTensor:
    """What DTensor makes of the pieces that a traced graph gives back; their form is torch's own."""
    rebuild = DTensor.__tensor_unflatten__
    return rebuild(inner, flatten_spec, size, stride)  # type: ignore[no-any-return, no-untyped-call]


def wait_async(tensor: Tensor) -> Tensor:
    """A gradient that tensor parallelism is still communicating, once it has arrived."""
    return tensor.wait() if isinstance(tensor, functional.AsyncCollectiveTensor) else tensor


# ---------------------------------------------------------------- tensor subclasses


def wraps_tensors(tensor: Tensor) -> bool:
    """Whether it is a subclass around tensors of its own; torch has no public test for the protocol."""
    return is_traceable_wrapper_subclass(tensor)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensor itself, or what a subclass says to be made of: nothing if it does not say."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor] if type(tensor) is Tensor else []
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def owns_bytes(tensor: Tensor) -> bool:
    """Whether it is a plain tensor, all of its storage, and nothing else holds that.

    Autograd may give one storage to several: a view, a sum or a torch.cat passes on what it got.
    """
    if is_traceable_wrapper_subclass(tensor):
        return False
    storage = tensor.untyped_storage()
    of_both = 2  # the tensor, and `storage`
    return storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) == of_both


def keep_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Hide writes from autograd: what a second gather writes is what it saved from the first."""
    return _unsafe_preserve_version_counter(tuple(tensors))


# ---------------------------------------------------------------- lists of tensors


def join_flat(tensors: Sequence[Tensor]) -> Tensor:
    """A 1-D copy of all tensors, one after another: one call, where torch.cat wants a view of each first."""
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def split_flat(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous views of a 1-D tensor, one after another, shaped as `like`: one call, not two each."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, list(like)))


def foreach_norm(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """All norms in one call, accumulated in `dtype`; the public get_total_norm has only the tensors' own."""
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """All products in one call; the public clip_grads_with_norm_ takes DTensors only with a DTensor norm."""
    torch._foreach_mul_(list(tensors), factor)


def keep_in_order(op: CustomOpDef) -> None:
    """Let compiled graphs run an operator where the program did; torch documents no way to say so yet."""
    if EffectType is not None and hasattr(op, "register_effect"):
        op.register_effect(EffectType.ORDERED)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a compiler holds a stand-in for the tensor, so that no message can be sent."""
    return isinstance(tensor, FakeTensor) or torch.compiler.is_compiling()


def register_foreach_type(cls: type[DTensor]) -> None:
    """Let stock optimizers and clip_grad_norm_ choose foreach by default; their lists hold exact types."""
    for supported in (optimizer_foreach_types, utils_foreach_types):
        if cls not in supported:
            supported.append(cls)


# ---------------------------------------------------------------- modules


def param_dict(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict in which a module keeps its parameters; `setattr` costs 20 times as much for every swap."""
    return module._parameters


def child_dict(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict in which a module keeps its children; to look into it in every forward has to cost nothing."""
    return module._modules


def reset_function_of(module: nn.Module) -> Callable[[], object] | None:
    """What draws a module's initial parameters; torch's MultiheadAttention names it privately."""
    names = ("reset_parameters", "_reset_parameters")
    return next((fn for name in names if callable(fn := getattr(module, name, None))), None)


def is_replicated_module(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` manages the module, so that nothing else may."""
    return "replicate" in (_get_registry(module) or {})


# ---------------------------------------------------------------- random numbers


def fill_shards_with(make_tracker: Callable[[], OffsetBasedRNGTracker]) -> None:
    """Let DTensor draw random fills as a tracker says, unless it has one; torch has no call to choose it."""
    if dtensor_random._rng_tracker is None:
        dtensor_random._rng_tracker = make_tracker()


# ---------------------------------------------------------------- autograd


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: then a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # of the next node on this thread


def base_made_since(number: int, tensor: Tensor) -> Tensor | None:
    """What `tensor` is a view of, if the graph made it since: writes to the view move the graph there."""
    node = None if tensor._base is None else tensor._base.grad_fn
    return None if node is None or node._sequence_nr() < number else tensor._base


def pack_hooks() -> list[Callable[[Tensor], object]]:
    """What packs saved tensors now, outermost first: torch shows the innermost only, so it is put aside."""
    pairs = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        pairs.append(pair)
    for pack, unpack in reversed(pairs):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return [pack for pack, _ in reversed(pairs)]


is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active  # by torch.func


def outside_transforms() -> AbstractContextManager[object]:
    """Run what is inside on plain tensors while torch.func transforms the module around it."""
    return torch._C._DisableFuncTorch() if is_transformed() else _NOTHING


# For attributes of many DTensors: torch asks each time whether they override it, and none does.
without_torch_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass


_NOTHING = nullcontext()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call once when the running backward has finished; autograd offers it to DDP and FSDP only."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def without_dynamo(fn: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of `fn`; unlike `torch.compiler.disable`, import it where it is used.

    Where nothing is being compiled there is nothing to keep out, and torch's wrapper is not entered.
    """
    disabled = _disable_dynamo(fn)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # traced, the first is True; in a compiled program that runs, dynamo waits for the next frame
        if torch.compiler.is_dynamo_compiling() or _frame_callback() is not None:
            return disabled(*args, **kwargs)
        return fn(*args, **kwargs)

    return call


_frame_callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def run_grad_hooks(param: Tensor, grad: DTensor) -> DTensor:
    """Run what `param.register_hook` collected: autograd never sees the sharded parameter, so it cannot."""
    for hook in (param._backward_hooks or {}).values():
        changed: Any = hook(grad)
        grad = grad if changed is None else changed
    return grad


def run_post_accumulate_hooks(param: Tensor) -> None:
    """Run what `param.register_post_accumulate_grad_hook` collected, for the same reason."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)


# Both dicts of hooks that the user hung on a parameter, or None: `any` of them says whether there are hooks.
grad_hooks_of: Callable[[Tensor], tuple[object, object]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)


def has_grad_hooks(param: Tensor) -> bool:
    """Whether the user hung any hook on the parameter."""
    return any(grad_hooks_of(param))


# ---------------------------------------------------------------- c10d


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves `device` in `group`; the public name is of the group's default device only."""
    return str(group._get_backend(device).name()).lower()


def new_group_of(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup | None:
    """A group of these ranks with the default group's timeout; torch would give it half an hour.

    Collective over `ranks` alone. None where the default group was bound to its device: torch would split
    that, which all of its ranks have to join, and it is open already.
    """
    assert dist.group.WORLD is not None
    if dist.group.WORLD.bound_device_id is not None:
        return None
    timeout = dist.group.WORLD._get_backend(device).options._timeout
    group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def default_store() -> Store:
    """The rendezvous store: the one channel with a timeout of its own that names who is missing."""
    return dist.distributed_c10d._get_default_store()


def all_gather_single(output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> None:
    """all_gather into one tensor. The public call changed its name, and takes three times as long."""
    if (work := group._allgather_base(output, input_, _gather_options())) is not None:
        work.wait()


def reduce_scatter_single(
    output: Tensor, input_: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """reduce_scatter of one tensor; as for `all_gather_single`."""
    if (work := group._reduce_scatter_base(output, input_, _reduce_options(op))) is not None:
        work.wait()


# Not asynchronous: NCCL then takes the current stream, with its priority, and gives no work.


@cache
def _gather_options() -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = False
    return options


@cache
def _reduce_options(op: dist.ReduceOp.RedOpType) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, False  # type: ignore[assignment]
    return options


# ---------------------------------------------------------------- torch's fully_shard


def attach_state(module: nn.Module, state: State) -> None:
    """Put `state` where torch's `fully_shard.state(module)`, and so its pipelining, looks.

    The key is torch's undecorated function, which lives in the closure of `fully_shard.state`.
    """
    vars(module).setdefault(STATE_KEY, {})[_STATE_FUNCTION] = state
    vars(module).setdefault(REGISTRY_KEY, {})[_STATE_FUNCTION.__name__] = RegistryItem()


def hide_from_dynamo(module: nn.Module) -> None:
    """Tell torch.compile, as FSDP does, that the parameters come and go and are not to be guarded."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


def state_of(module: nn.Module) -> object:
    """What `attach_state`, or torch's own `fully_shard`, put there."""
    return vars(module).get(STATE_KEY, {}).get(_STATE_FUNCTION)


_STATE_FUNCTION = inspect.getclosurevars(torch_fully_shard.state).nonlocals["func"]  # type: ignore[attr-defined]


def process_group_comms(group: dist.ProcessGroup) -> tuple[AllGather, ReduceScatter]:
    """torch's own comms over the group's allocator; it publishes the interface, not these."""
    return comms.ProcessGroupAllocAllGather(group), comms.ProcessGroupAllocReduceScatter(group)


def symmetric_memory_comms(group: dist.ProcessGroup) -> tuple[AllGather, ReduceScatter | None]:
    """torch's own comm over NCCL symmetric memory, for gathers; its reduce-scatter only sums."""
    return comms.SymmMemAllGather(group, "NCCL"), None
