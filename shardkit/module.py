"""FSDPModule: what a sharded module can do, method by method as torch's FSDP2.

Level 13 of the data flow. Every method writes a setting of the module's unit, or calls the unit; settings can
be read back through `fully_shard.state(module).unit.settings` and are printed by `model_plan`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from shardkit._torch import AllGather, ReduceScatter, process_group_comms, symmetric_memory_comms
from shardkit.collectives import new_route
from shardkit.interop import gather_for_half_backward, unit_of
from shardkit.unit import Unit


class UnshardHandle(TorchUnshardHandle):
    """An `unshard` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Return when the gathered parameters are registered and the current stream may use them."""
        if self._unit is not None:
            self._unit.wait_for_unshard()
            self._unit = None


class FSDPModule(TorchFSDPModule):
    """What `fully_shard` adds to a module's class; torch's own code accepts it as its FSDPModule."""

    def reshard(self) -> None:
        """Free this module's gathered parameters and register the shards. Not recursive, no communication."""
        self._unit.is_lent = False
        self._unit.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters; they stay so until `reshard()`. Not recursive. Collective over the
        shard axis.

        Args:
            async_op: return a handle at once; forward waits for it by itself.
        """
        unit, tree = self._unit, self._unit.tree
        unit.is_pinned = unit.is_lent = True
        if tree.forward_root is None and not tree.awaits_callback:  # no iteration has waited for the step
            tree.streams.gather_after(tree.post_optim_event)
        unit.unshard()
        if async_op:
            return UnshardHandle(unit)
        unit.wait_for_unshard()
        return None

    def reset_iter_state(self) -> None:
        """Forget an iteration that ended in an exception. The next forward of the root does so by itself.

        Call it on the root, on every rank. Gradients that were reduced before the exception stay in `.grad`.

        Raises:
            RuntimeError: the module is not the root.
        """
        if not self._unit.is_root:
            raise RuntimeError(
                f"{self._unit.name}: reset_iter_state must be called on the root module. Call it on the "
                "model."
            )
        self._unit.tree.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the step's last, which waits for reductions. For the whole tree."""
        self._unit.tree.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; without, they accumulate unsharded in the reduce dtype."""
        for unit in self._units(recurse):
            unit.settings.gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether HSDP sums over the replicas too; else partial sums accumulate in the reduce dtype."""
        for unit in self._units(recurse):
            unit.settings.reduce.all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free gathered parameters after forward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward!r}: expected a bool. Only fully_shard takes a "
                "number of ranks."
            )
        for unit in self._units(recurse):
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free gathered parameters after backward; else the next micro-batch need not gather."""
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these modules as soon as this one has been gathered in forward."""
        self._unit.settings.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these modules, not the one that ran before, once this one is gathered in backward."""
        self._unit.settings.backward_prefetch = _units_of(modules)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Let `comm` allocate the gathered rows and gather them; parameters are copied out of its buffer."""
        for bucket in self._single_bucket_unit("set_custom_all_gather").buckets:
            bucket.gather.comm = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Let `comm` allocate the gradients' rows and reduce them."""
        for bucket in self._single_bucket_unit("set_custom_reduce_scatter").buckets:
            bucket.grads.comm = comm

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call `hook` on the reduced row (1-D, reduce dtype, this rank's shard) before it is divided and
        cast.

        Args:
            stream: where to run it; only without native HSDP.
        """
        unit = self._single_bucket_unit("set_all_reduce_hook")
        if stream is not None and any(
            bucket.spec.axes.replicate_group is not None for bucket in unit.buckets
        ):
            raise ValueError(
                "set_all_reduce_hook: a mesh with replicas reduces on a stream of its own. Leave `stream` "
                "out."
            )
        unit.settings.reduce.hook, unit.settings.reduce.hook_stream = hook, stream

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next iteration's gathers wait for `event`, once, and not for all of the current stream."""
        self._unit.tree.post_optim_event = event

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor`, not the number of ranks; on any backend and mesh."""
        self._unit.settings.reduce.divide_factor = factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives only ever sum, and scale separately."""
        self._unit.settings.reduce.sum_only = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Count what a rank did not use as zero gradients, so that ranks may use different parameters."""
        for unit in self._units(recurse):
            unit.settings.reduce.fill_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight in the tree; each holds its unit's unsharded gradients."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}. Pass a number of "
                "reductions."
            )
        if max_input_buffers < 1:
            raise ValueError(
                f"max_input_buffers must be a positive int, got {max_input_buffers}. One is the least."
            )
        for unit in self._units(recurse):
            unit.settings.max_input_buffers = max_input_buffers
        tree = self._unit.tree
        tree.reductions.limit = max(unit.settings.max_input_buffers for unit in tree.units)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce over process groups of their own, so that reductions and gathers share no communicator.

        Collective over the shard axis: all its ranks must call.
        """
        groups: dict[str, dist.ProcessGroup] = {}
        for bucket in [bucket for unit in self._units(recurse) for bucket in unit.buckets]:
            if bucket.gather.route is None:
                continue
            name = bucket.gather.route.group.group_name
            if enable and name not in groups:
                ranks = dist.get_process_group_ranks(bucket.gather.route.group)
                groups[name] = dist.new_group(
                    ranks, use_local_synchronization=True, group_desc="shardkit_reduce_scatter"
                )
            bucket.grads.route = (
                new_route(groups[name], bucket.spec.device) if enable else bucket.gather.route
            )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's parameters; an embedding's does not."""
        self._unit.settings.unshard_in_backward = unshard_in_backward

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let the process group allocate the communication buffers, where it can (NCCL with SHARP)."""
        self._set_comms(
            "set_allocate_memory_from_process_group_for_comm", process_group_comms if enable else None
        )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Communicate through symmetric memory. Needs NCCL.

        Raises:
            NotImplementedError: the group's backend has no symmetric memory.
        """
        for bucket in self._unit.buckets:
            name = "none" if bucket.gather.route is None else dist.get_backend(bucket.gather.route.group)
            if name != "nccl" or bucket.spec.device.type != "cuda":
                raise NotImplementedError(
                    f"set_symm_mem_for_comm: symmetric memory needs the nccl backend on CUDA, got {name} on "
                    f"{bucket.spec.device}. Leave the call out on this backend."
                )
        self._set_comms("set_symm_mem_for_comm", symmetric_memory_comms)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As nn.Module's; gathered, and so collective over the shard axis, within a backward in two halves.

        Zero-bubble pipeline schedules compute the gradients of inputs first. Before that, and again before
        those of weights, they ask for the parameters at the ends of the graph, which are not the shards.
        """
        unit = self._unit
        if unit.is_lent and not (unit.tree.is_last_backward or unit.settings.reshard_after_backward):
            gather_for_half_backward([unit for unit in self._units(recurse) if unit.is_lent])
        return super().parameters(recurse)  # type: ignore[misc, no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module's, on the shards, also while gathered parameters are registered in their place."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for param in [param.sharded for unit in self._units(True) for param in unit.params]:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        result = super()._apply(*args, **kwargs)
        self._unit.adopt()
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: a sharded module cannot be deep-copied, because its hooks and buffers "
            "belong to one unit. Build a second model with fully_shard and load state_dict() into it; for "
            "averages copy the parameters, which are DTensors."
        )

    @property
    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None, "an FSDPModule has a unit"
        return unit

    def _units(self, recurse: bool) -> Iterator[Unit]:
        module = cast(nn.Module, self)
        for below in module.modules() if recurse else [module]:
            if (unit := unit_of(below)) is not None:
                yield unit

    def _single_bucket_unit(self, method: str) -> Unit:
        if len(self._unit.buckets) > 1:
            raise ValueError(
                f"{method}: {self._unit.name} communicates in {len(self._unit.buckets)} buckets (several "
                "meshes or dtypes), so it is not clear which is meant. Shard those parameters in units of "
                "their own."
            )
        return self._unit

    def _set_comms(
        self, method: str, make: Callable[[dist.ProcessGroup], tuple[AllGather, ReduceScatter | None]] | None
    ) -> None:
        unit = self._single_bucket_unit(method)
        for bucket in unit.buckets:
            if bucket.gather.route is not None:
                pair = (None, None) if make is None else make(bucket.gather.route.group)
                bucket.gather.comm, bucket.grads.comm = pair


class _BehindTheClass(TorchFSDPModule):
    """Passes over what torch's FSDPModule would do when the original class calls `super()`."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]


_class_of: dict[type[nn.Module], type[nn.Module]] = {}


def become_fsdp_module(module: nn.Module) -> None:
    """Swap the module's class for one that is an FSDPModule as well."""
    cls = type(module)
    if cls not in _class_of:
        # the original class stays at __mro__[2], where dynamo and torch's __new__ look for it
        _class_of[cls] = types.new_class(f"FSDP{cls.__name__}", (FSDPModule, cls, _BehindTheClass))
        _class_of[cls].__module__ = __name__
    module.__class__ = _class_of[cls]


def _units_of(modules: Sequence[TorchFSDPModule]) -> list[Unit]:
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(
                f"expected modules that fully_shard has been called on, got a {type(module).__name__}. Shard "
                "it first."
            )
        units.append(unit)
    return units
