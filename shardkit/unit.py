"""Unit: the module(s) of one `fully_shard` call. Tree: the units below one root, and the iteration they run.

Level 10 of the data flow. A unit turns its modules' parameters into buckets, and carries out what `hooks.py`
triggers: unshard, reshard, reduce. What units share lies in their tree: the forward order, the streams, the
    reductions in flight.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor

from shardkit._torch import call_after_backward, in_backward
from shardkit.agreement import check_agreement
from shardkit.bucket import Bucket
from shardkit.collectives import Route, has_peers, new_route
from shardkit.errors import PlanMismatchError
from shardkit.layout import BucketSpec, ShardedShape, interleaved_layout
from shardkit.params import ParamSpec
from shardkit.precision import compute_dtype, reduce_dtype
from shardkit.reduction import ReduceOptions, Reduction
from shardkit.schedule import ForwardOrder
from shardkit.sharded_param import ShardedParam
from shardkit.sharding import sharding_of
from shardkit.streams import Streams


@dataclass(slots=True)
class UnitSettings:
    """What the user asked of one unit; every setter of `FSDPModule` writes here, and it can be read back."""

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    gradient_sync: bool = True
    unshard_in_backward: bool = True
    max_input_buffers: int = 1
    reduce: ReduceOptions = field(default_factory=ReduceOptions)
    all_gather: AllGather | None = None
    forward_prefetch: list[Unit] = field(default_factory=list)
    backward_prefetch: list[Unit] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """What `fully_shard` was told about dtypes and devices, for good."""

    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    device: torch.device


class Unit:
    """The parameters of one `fully_shard` call and their buckets."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        managed: Sequence[tuple[str, nn.Module]],
        specs: Sequence[ParamSpec],
        policy: UnitPolicy,
    ) -> None:
        self.modules, self.managed, self.policy = tuple(modules), tuple(managed), policy
        self.settings = UnitSettings()
        self.name = ", ".join(type(module).__name__ for module in modules)
        self.params = [ShardedParam(spec, sharding_of(spec, spec.wish), _shard_of(spec)) for spec in specs]
        self.small_groups: dict[
            int, dist.ProcessGroup
        ] = {}  # id of a bucket's group -> its part of reshard_after_forward ranks
        self.replicas: dict[int, Route] = {}
        self.modules_to_run: set[nn.Module] = (
            set()
        )  # of a unit of several modules: what this forward has not run yet
        self.index = 0  # in the tree
        self.is_pinned = False  # the user called unshard()
        self.in_backward = False  # between pre_backward and post_backward
        with torch.no_grad():
            self.buckets = self._make_buckets()
        self.tree = Tree(self)
        _live_units.add(self)

    @property
    def is_root(self) -> bool:
        """Whether no unit lies above it."""
        return self.tree.root is self

    def adopt(self) -> None:
        """Take in what the user put in a parameter's place: `.to`, `to_empty`, `load_state_dict(assign=True)`
        replace it.

        Raises:
            ValueError: it is no DTensor of the same placement and shape.
        """
        replaced = [param for param in self.params if not param.is_adopted]
        if not replaced:
            return
        with torch.no_grad():
            for param in replaced:
                param.take_replacement()
            if all(_fits(bucket) for bucket in self.buckets):
                for bucket in self.buckets:
                    bucket.take_in(replaced)
            else:
                self.buckets = self._make_buckets()

    def unshard(self) -> None:
        """Start to gather every bucket. Collective over the shard axis."""
        if any(not bucket.is_gathering and not bucket.is_unsharded for bucket in self.buckets):
            self.adopt()
            self._check_devices()
        for bucket in self.buckets:
            bucket.start_unshard(self.tree.streams, self.settings.all_gather, self._small_group(bucket))

    def wait_for_unshard(self) -> None:
        """Wait for the gathers and register the gathered parameters."""
        for bucket in self.buckets:
            bucket.finish_unshard(self.tree.streams, self._hook_for)

    def reshard(self) -> None:
        """Free the gathered parameters and register the shards."""
        self.is_pinned = False
        for bucket in self.buckets:
            bucket.reshard(self.tree.streams)

    def reshard_after_forward(self) -> None:
        """Reshard as the setting says: wholly, or to a piece that fewer ranks can gather again."""
        setting = self.settings.reshard_after_forward
        if setting is None or isinstance(setting, bool):
            self.reshard()
            return
        for bucket in self.buckets:
            if self._small_group(bucket) is None:
                bucket.reshard(self.tree.streams)
            else:
                bucket.reshard_to(self.tree.streams, setting)

    def post_backward(self, *, keep: bool = False) -> None:
        """Take the gradients that backward left, reshard, and start to reduce. Collective over the
        data-parallel axes.

        Args:
            keep: stay gathered whatever the setting says: backward has built a graph that needs the
                parameters.
        """
        self.in_backward = False
        for bucket in self.buckets:
            with torch.no_grad():
                self.tree.finish_reduction_of(bucket)
                bucket.grads.sweep()
        if self.settings.reshard_after_backward and not keep:
            self.reshard()
        if self.settings.gradient_sync:
            for bucket in self.buckets:
                self._reduce(bucket)

    def reset(self) -> None:
        """Forget a failed iteration: no gathered parameters, no gradients that were not reduced."""
        self.modules_to_run.clear()
        self.in_backward = False
        for bucket in self.buckets:
            for param in bucket.params:
                if param.unsharded is not None:
                    param.unsharded.grad = None
            bucket.grads.drop()
        self.reshard()

    def kept_tensors(self) -> Iterator[Tensor]:
        """Tensors with a graph that the unit's modules keep as attributes: a loss may start from them."""
        for _, module in self.managed:
            for value in vars(module).values():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    yield value

    def rename(self, name: str, names: dict[int, str]) -> None:
        """Names as the root sees them; `names` maps the id of a sharded parameter to its own."""
        self.name = name
        for param in self.params:
            param.name = names.get(id(param.sharded), param.name)
        for bucket in self.buckets:
            bucket.label = f"unit {name!r}"

    def describe(self) -> list[str]:
        """What must agree on all ranks of a group, a line a parameter."""
        return [f"{self.name}: {line}" for bucket in self.buckets for line in bucket.describe()]

    def _reduce(self, bucket: Bucket) -> None:
        options = self.settings.reduce
        if bucket.grads.is_empty and not (options.fill_unused and bucket.is_trainable):
            return
        self.tree.make_room()
        replicas = self.replicas.get(id(bucket.spec.axes.replicate_group))
        self.tree.in_flight.append(Reduction(bucket, options, self.tree.streams, replicas))

    def _hook_for(self, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        """The hook that takes a gathered parameter's gradient as soon as autograd has accumulated it."""
        unit_ref, bucket_ref = (
            weakref.ref(self),
            weakref.ref(bucket),
        )  # autograd hides hooks from the garbage collector

        def take_grad(param: Tensor) -> None:
            unit, bucket = unit_ref(), bucket_ref()
            if unit is None or bucket is None or param.grad is None:
                return
            unit.tree.enter_backward()
            unit.tree.finish_reduction_of(bucket)
            grad, param.grad = param.grad, None
            bucket.grads.add(index, grad)

        return take_grad

    def _make_buckets(self) -> list[Bucket]:
        groups: dict[object, list[ShardedParam]] = {}
        for param in self.params:
            axes, local = param.axes, param.local
            key = (id(axes.shard_group), id(axes.replicate_group), local.dtype, local.device)
            groups.setdefault(key, []).append(param)
        return [self._make_bucket(params) for params in groups.values()]

    def _make_bucket(self, params: list[ShardedParam]) -> Bucket:
        axes, dtype = params[0].axes, params[0].local.dtype
        shapes = [ShardedShape(p.name, p.shape, p.wish.dim) for p in params]
        offloaded = isinstance(self.policy.offload, CPUOffloadPolicy)
        is_meta = params[0].local.is_meta
        spec = BucketSpec(
            layout=interleaved_layout(shapes, axes.shard_size, axes.shard_rank),
            axes=axes,
            dtype=dtype,
            compute_dtype=compute_dtype(dtype, self.policy.precision),
            reduce_dtype=reduce_dtype(dtype, self.policy.precision),
            device=self.policy.device,
            shard_device=params[0].local.device if is_meta or not offloaded else torch.device("cpu"),
            pin_memory=offloaded and not is_meta and _can_pin(self.policy),
        )
        route = None if axes.shard_group is None else new_route(axes.shard_group)
        if axes.replicate_group is not None and id(axes.replicate_group) not in self.replicas:
            self.replicas[id(axes.replicate_group)] = new_route(axes.replicate_group)
        bucket = Bucket(params, spec, route)
        bucket.label = f"unit {self.name!r}"
        return bucket

    def _small_group(self, bucket: Bucket) -> dist.ProcessGroup | None:
        return self.small_groups.get(id(bucket.spec.axes.shard_group))

    def _check_devices(self) -> None:
        on_meta = [param.name for param in self.params if param.local.is_meta]
        if on_meta:
            raise RuntimeError(
                f"{self.name}: parameters are still on the meta device: {on_meta}. Call to_empty(device=...) "
                "on the model and initialise it, or load a checkpoint with assign=True, before the first "
                "forward."
            )
        offloaded = isinstance(self.policy.offload, CPUOffloadPolicy)
        wrong = [param.name for param in self.params if offloaded and param.local.device.type != "cpu"]
        if wrong:
            raise RuntimeError(
                f"{self.name}: with CPUOffloadPolicy parameters rest on the CPU, but {wrong} do not. Call "
                "to_empty(device='cpu'), or load a state dict that is on the CPU."
            )


class Tree:
    """What the units below one root share during an iteration."""

    def __init__(self, root: Unit) -> None:
        self.root: Unit = root
        self.units: list[Unit] = [root]
        self.order = ForwardOrder()
        self.streams = Streams(root.policy.device)
        self.in_flight: deque[Reduction] = deque()
        self.unchecked: list[Reduction] = []
        self.forward_root: Unit | None = None  # whose forward the running iteration is
        self.is_last_backward = True
        self.awaits_callback = False  # autograd will call us when the running backward is over
        self.keeps_gathered = False  # the running backward builds a graph that needs the gathered parameters
        self.post_optim_event: torch.Event | None = None
        self.is_agreed = False
        self._checked_size = (
            -1
        )  # of the modules' parameter and child lists, when all parameters were last seen to be managed
        self.ignored: set[int] = set()  # ids of parameters that no unit manages, as the user asked

    def absorb(self, root: Unit, inner: Sequence[Unit], ignored: frozenset[nn.Parameter]) -> None:
        """`root`'s tree takes in the trees of the units below its modules, and names everything anew."""
        self.ignored |= {id(param) for param in ignored}
        for unit in inner:
            if unit.tree is not self:
                taken = unit.tree
                self.ignored |= taken.ignored
                self.units[-1:-1] = taken.units
                for other in taken.units:
                    other.tree = self
        for index, unit in enumerate(self.units):
            unit.index = index
        self._rename(root)

    def check_all_managed(self) -> None:
        """Refuse trainable parameters that were added after sharding: nothing would reduce their gradients.

        Raises:
            ValueError: there is one, and it was not in `ignored_params`.
        """
        modules = [module for unit in self.units for _, module in unit.managed]
        size = sum(len(vars(module)["_parameters"]) + len(vars(module)["_modules"]) for module in modules)
        if size == self._checked_size:
            return
        managed = {
            id(p) for unit in self.units for param in unit.params for p in (param.sharded, param.unsharded)
        }
        for root in self.root.modules:
            for name, param in root.named_parameters():
                if (
                    param.requires_grad
                    and id(param) not in managed | self.ignored
                    and not isinstance(param, DTensor)
                ):
                    raise ValueError(
                        f"param {name!r}: it was added after fully_shard, so it is not sharded and its "
                        "gradient would differ on every rank. Add it before, call fully_shard on its module, "
                        "or name it in ignored_params and reduce it yourself."
                    )
        self._checked_size = size

    def agree(self) -> None:
        """Once, compare plans over every group that will communicate. Collective over the mesh."""
        if self.is_agreed:
            return
        self.is_agreed = True
        lines = [line for unit in self.units for line in unit.describe()]
        groups: dict[str, dist.ProcessGroup] = {}
        for unit in self.units:
            for bucket in unit.buckets:
                for group in (bucket.spec.axes.shard_group, bucket.spec.axes.replicate_group):
                    if group is not None and group.size() > 1 and has_peers(group, bucket.spec.device):
                        groups[group.group_name] = group
        model = f"model {type(self.root.modules[0]).__name__!r}"
        for group in groups.values():
            check_agreement(lines, group, model)
        self._warn_if_replicas_differ(groups, model)

    def _warn_if_replicas_differ(self, groups: dict[str, dist.ProcessGroup], model: str) -> None:
        """Ranks that built different weights would train different models, for ever, without a sign of it."""
        replicas = {bucket.spec.axes.replicate_group for unit in self.units for bucket in unit.buckets}
        for group in groups.values():
            if group not in replicas:
                continue
            buckets = [b for unit in self.units for b in unit.buckets if b.spec.axes.replicate_group is group]
            try:
                check_agreement([f"{b.label}: {b.checksum()}" for b in buckets], group, model)
            except PlanMismatchError as error:
                warnings.warn(
                    f"{model}: the replicas of an HSDP mesh start from different weights ({error}). Seed all "
                    "ranks alike, or broadcast the weights over the replicate axis before training.",
                    stacklevel=2,
                )

    def enter_backward(self) -> None:
        """Be called when the running backward is over."""
        if not self.awaits_callback and in_backward():
            self.awaits_callback = True
            self.keeps_gathered = False
            call_after_backward(self.end_backward)

    def end_backward(self) -> None:
        """Complete every unit whose inputs needed no gradient, then wait for all reductions of the last
        backward.
        """
        self.awaits_callback = False
        self.forward_root = None
        for unit in reversed(self.units):
            unit.modules_to_run.clear()
            unit.post_backward(keep=self.keeps_gathered)
        if not self.is_last_backward:
            return
        while self.in_flight:
            self.finish_oldest()
        self.order.clear()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.drop_gather()
        for reduction in self.unchecked:
            reduction.wait_on_host()

    def make_room(self) -> None:
        """Finish reductions until one more may be in flight."""
        limit = max(unit.settings.max_input_buffers for unit in self.units)
        while len(self.in_flight) >= limit:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Finish the reduction that has been in flight longest."""
        reduction = self.in_flight.popleft()
        reduction.finish()
        self.unchecked.append(reduction)

    def finish_reduction_of(self, bucket: Bucket) -> None:
        """Finish what is in flight of `bucket`, so that its gradients can gather anew."""
        while any(reduction.bucket is bucket for reduction in self.in_flight):
            self.finish_oldest()

    def check_use(self) -> None:
        """Raise what earlier reductions found only on the device."""
        unchecked, self.unchecked = self.unchecked, []
        for reduction in unchecked:
            reduction.check_use()

    def reset(self) -> None:
        """Forget a failed iteration. Collective where gathers are under way: all ranks must have failed."""
        while self.in_flight:
            self.finish_oldest()
        self.unchecked = []
        self.order.clear()
        self.forward_root = None
        self.awaits_callback = False
        for unit in self.units:
            unit.reset()

    def _rename(self, root: Unit) -> None:
        if len(root.modules) > 1:
            return
        names = {id(param): name for name, param in root.modules[0].named_parameters(remove_duplicate=True)}
        of_module = {module: name for name, module in root.modules[0].named_modules()}
        for unit in self.units:
            unit.rename(", ".join(of_module.get(m, "") or type(m).__name__ for m in unit.modules), names)


_live_units: weakref.WeakSet[Unit] = weakref.WeakSet()


def managed_params() -> dict[int, str]:
    """The name of every sharded parameter of a live unit, by id: weak references would forbid torch to swap
    them.
    """
    return {id(param.sharded): param.name for unit in _live_units for param in unit.params}


def _shard_of(spec: ParamSpec) -> Tensor:
    """This rank's part of the parameter that the user passed, cut as `torch.chunk` cuts."""
    full, axes, dim = spec.local, spec.axes, spec.wish.dim
    chunk = -(-full.shape[dim] // axes.shard_size)
    start = min(axes.shard_rank * chunk, full.shape[dim])
    return full.narrow(dim, start, min(chunk, full.shape[dim] - start))


def _fits(bucket: Bucket) -> bool:
    """Whether the parameters' present tensors have the dtype and device of the bucket's shard buffer."""
    flat = bucket.shard.flat
    return all(p.local.dtype == flat.dtype and p.local.device == flat.device for p in bucket.params)


def _can_pin(policy: UnitPolicy) -> bool:
    assert isinstance(policy.offload, CPUOffloadPolicy)
    return policy.offload.pin_memory and policy.device.type != "cpu"
