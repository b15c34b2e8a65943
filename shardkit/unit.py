"""Unit: the module(s) of one `fully_shard` call. Tree: the units below one root, and the iteration they run.

Level 12 of the data flow. A unit carries out what `hooks.py` triggers on its buckets: unshard, reshard,
reduce. What units share lies in their tree: the forward order, the streams, the reductions in flight.

[Note: rows of gradients]
A unit's first gradient finds those of the unit before it on the wire, in rows or as they are. To hold more
beside them would be more memory than the gradients themselves, so there are no new rows before that reduction
is over. On the CPU, where a reduction needs the host to go on, it is waited for then and there. Where it runs
on a stream of its own, waiting would stall the computation: the gradients stay where autograd put them until
the unit's backward is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from shardkit._torch import (
    call_after_backward,
    child_dict,
    has_grad_hooks,
    in_backward,
    outside_transforms,
    param_dict,
)
from shardkit.agreement import groups_of, largest_of_ranks
from shardkit.assemble import UnitPolicy, check_devices, make_buckets, shard_params
from shardkit.bucket import Bucket
from shardkit.containers import KeptTensors
from shardkit.grads import without_grad
from shardkit.params import ParamSpec
from shardkit.reduction import ReduceOptions, Reduction, ReductionQueue
from shardkit.schedule import Boundary, ForwardOrder, Region, Step, Tape
from shardkit.sharded_param import GradHook, Held
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
    forward_prefetch: list[Unit] = field(default_factory=list)
    backward_prefetch: list[Unit] = field(default_factory=list)


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
        with torch.no_grad():
            self.params = shard_params(specs)
            self.buckets = make_buckets(self.params, policy)
        self._held = Held(self.params)
        self._hook_for = partial(_grad_hook, weakref.ref(self))
        self.attributes = [
            keys_or_values
            for _, module in self.managed
            for keys_or_values in (param_dict(module).keys(), child_dict(module).values())
        ]  # live views: the names of the modules' parameters, and their children
        self._is_checked = False  # that every parameter is where a gather can read it
        self.kept = KeptTensors([module for _, module in self.managed])
        self.depth = 0  # forwards of the unit's modules that are running now, one in another
        self.first_node = 0  # what this forward computes has nodes of this number and above
        self.modules_to_run: set[nn.Module] = set()  # what this forward has not run yet
        self.expects_backward = False  # an output of this forward requires a gradient
        self.is_pinned = False  # the user called unshard(), or wants it kept after backward
        self.is_lent = False  # the user called unshard(), and not reshard() since, whatever hooks did
        self.in_backward = False  # between pre_backward and post_backward
        self.is_held = False  # backward is inside a checkpoint that may run it forward again
        self.is_settled = True  # the running backward has left nothing to take, reshard or reduce
        self.tree = Tree(self)
        _live_units.add(self)

    @property
    def is_root(self) -> bool:
        """Whether no unit lies above it."""
        return self.tree.root is self

    def adopt(self) -> None:
        """Take in what the user put in a parameter's place.

        `.to`, `to_empty` and `load_state_dict(assign=True)` replace it.

        Raises:
            ValueError: it is no DTensor of the same placement and shape.
        """
        if self._held.is_unchanged():
            return
        replaced = [param for param in self.params if not param.is_adopted]
        if not replaced:
            return
        self._is_checked = False
        with torch.no_grad():
            for param in replaced:
                param.take_replacement()
            if all(_fits(bucket) for bucket in self.buckets):
                for bucket in self.buckets:
                    bucket.take_in(replaced)
            else:
                _check_no_grads_wait(self)
                self.buckets = make_buckets(self.params, self.policy, self.buckets)
                self.tree.rename()
        self._held = Held(self.params)
        self.tree.streams.gather_after()  # the shards were written just now, maybe within an iteration

    def unshard(self) -> None:
        """Start to gather every bucket. Collective over the shard axis."""
        in_backward = self.tree.awaits_callback
        if not in_backward:  # nobody replaces parameters during a backward
            self.adopt()
        if not self._is_checked:
            check_devices(self.name, self.params, self.policy)
            self._is_checked = True
        for bucket in self.buckets:
            bucket.start_unshard(self.tree.streams, in_backward=in_backward)

    def wait_for_unshard(self) -> None:
        """Wait for the gathers and register the gathered parameters."""
        for bucket in self.buckets:
            bucket.finish_unshard(self.tree.streams, self._hook_for)

    def reshard(self) -> None:
        """Free the gathered parameters and register the shards."""
        self.is_pinned = False
        for bucket in self.buckets:
            bucket.reshard(self.tree.streams)

    def begin_iteration(self) -> None:
        """Reshard what only the root's rule kept gathered: its shards may have changed since.

        Decided by the settings alone, so that all ranks gather alike; a graph that is still to go backward
        finds its parameters again, as they are gathered into the same bytes.
        """
        if self.settings.reshard_after_forward is None and not self.is_pinned:
            self.reshard()

    def reshard_after_forward(self) -> None:
        """Reshard as the setting says: wholly, or to a piece that fewer ranks can gather again."""
        setting = self.settings.reshard_after_forward
        if setting is None or isinstance(setting, bool):
            self.reshard()
            return
        for bucket in self.buckets:
            keep_for = 0 if bucket.gather.small_group is None else setting
            bucket.reshard(self.tree.streams, keep_for)

    def open_rows(self) -> None:
        """Make room for gradients now, not at the first one, which comes on some ranks alone.

        A reduction over the replicas has a second collective, which all of them have to come to at one point.
        """
        for bucket in self.buckets:
            self.tree.reductions.finish_of(bucket)
            if bucket.grads.is_empty and _trains(bucket):
                self.tree.reductions.make_room()
                with torch.no_grad():
                    bucket.grads.add({})

    def post_backward(self, *, keep: bool = False) -> None:
        """Take the gradients that backward left, reshard, and start to reduce. Collective over the mesh.

        Args:
            keep: stay gathered whatever the setting says: backward has built a graph that needs it.
        """
        self.in_backward, self.is_settled = False, True
        with without_grad():
            for bucket in self.buckets:
                self.tree.reductions.finish_of(bucket)
                bucket.grads.sweep(self.tree.reductions.make_room)
        if keep:
            watch_grads(self)
        if not self.settings.reshard_after_backward:
            self.is_pinned |= all(bucket.is_unsharded for bucket in self.buckets)
        elif not (keep or self.is_held):
            self.reshard()
        if self.settings.gradient_sync:
            for bucket in self.buckets:
                self._reduce(bucket)

    def reset(self) -> None:
        """Forget a failed iteration: no gathered parameters, no gradients that were not reduced."""
        self.modules_to_run.clear()
        self.depth = 0
        self.in_backward = self.is_held = False
        for bucket in self.buckets:
            for param in bucket.params:
                if param.unsharded is not None:
                    param.unsharded.grad = None
            bucket.grads.drop()
        self.reshard()

    def _reduce(self, bucket: Bucket) -> None:
        options = self.settings.reduce
        is_deferred = options.all_reduce and bucket.grads.partial is not None
        if bucket.grads.is_empty and not is_deferred and not (options.fill_unused and _trains(bucket)):
            return
        self.tree.reductions.add(partial(Reduction, bucket, options, self.tree.streams))


class Tree:
    """What the units below one root share."""

    def __init__(self, root: Unit) -> None:
        self.root: Unit = root
        self.units: list[Unit] = [root]
        self.order = ForwardOrder()
        self.tape = Tape()  # of the running forward
        self.open: list[Tape] = []  # of forwards that no backward has undone
        self.undone: list[Tape] = []  # which the running backward has come to
        self.starts_anew = False  # the last backward is over: what is still open then is not undone any more
        self.region: Region | None = None  # in which it is
        self.streams = Streams(root.policy.device)
        self.reductions = ReductionQueue()
        self.ignored: set[int] = set()  # ids of parameters that no unit manages, as the user asked
        self.forward_root: Unit | None = None  # whose forward the running iteration is
        self.is_last_backward = True
        self.halves_backward = False  # a pipeline schedule asks for gradients of inputs and of weights apart
        self.awaits_callback = False  # autograd will call us when the running backward is over
        self.keeps_gathered = False  # the running backward builds a graph that needs the parameters
        self.post_optim_event: torch.Event | None = None

    def absorb(self, inner: Sequence[Unit], ignored: frozenset[nn.Parameter]) -> None:
        """Take in the trees of the units below the root's modules, and name everything anew."""
        self.ignored |= {id(param) for param in ignored}
        for unit in inner:
            if unit.tree is not self:
                taken = unit.tree
                self.reductions.limit = max(self.reductions.limit, taken.reductions.limit)
                self.ignored |= taken.ignored
                self.units[-1:-1] = taken.units
                for other in taken.units:
                    other.tree = self
        self.rename()

    def index(self, unit: Unit) -> int:
        """A unit's number in the forward order."""
        return self._indices[id(unit)]

    def rename(self) -> None:
        """Name units and parameters as the root sees them."""
        self._indices = {id(unit): index for index, unit in enumerate(self.units)}
        if len(self.root.modules) == 1:
            root = self.root.modules[0]
            of_param = {id(param): name for name, param in root.named_parameters()}
            of_module = {id(module): name for name, module in root.named_modules()}
            for unit in self.units:
                unit.name = ", ".join(of_module.get(id(m)) or type(m).__name__ for m in unit.modules)
                for param in unit.params:
                    param.name = of_param.get(id(param.registered), param.name)
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.label = f"unit {unit.name!r}"

    def enter_backward(self) -> None:
        """Be called when the running backward is over."""
        if not self.awaits_callback and in_backward():
            self.awaits_callback = True
            self.keeps_gathered = False
            for unit in self.units:
                unit.is_settled = False
            call_after_backward(self.end_backward)

    def visit(self, tape: Tape, boundary: Boundary) -> None:
        """Backward comes to what forward did: take part first in what it passes over, as other ranks may not.

        Collective over the mesh, for units whose unused parameters count as zero.
        """
        self.undo(tape, tape.visit(boundary))

    def rerun(self, unit: Unit) -> None:
        """Activation checkpointing runs `unit` forward again: gather first all that it may run with it.

        Collective over the mesh, as `visit`: ranks that pass over the checkpoint do the same.
        """
        self.enter_backward()
        for tape in (*reversed(self.undone), *reversed(self.open)):
            if steps := tape.rerun(self.index(unit)):
                self.undo(tape, steps)
                return

    def begin_backward_of(self, unit: Unit) -> None:
        """Gather the unit's parameters for its backward, and prefetch. Collective over the shard axis."""
        if unit.in_backward:
            return
        unit.in_backward, unit.is_settled = True, False
        if unit.settings.reduce.fill_unused and not self.streams.runs_ahead:
            unit.open_rows()
        following = self.order.prefetch_for(self.index(unit))
        with outside_transforms():
            if unit.settings.unshard_in_backward:
                unit.unshard()
                unit.wait_for_unshard()
            if unit.settings.backward_prefetch:
                for other in unit.settings.backward_prefetch:
                    other.unshard()
            elif following is not None and self.units[following].settings.unshard_in_backward:
                self.units[following].unshard()

    def end_backward(self) -> None:
        """Complete units whose inputs needed no gradient; wait for all reductions after the last backward."""
        self._finish_tapes()
        _pass_over_before(None, self)
        _go_into(None, self)
        for tape in self.undone:
            tape.rewind()
        self.open = [tape for tape in self.open if tape not in self.undone]
        self.undone.clear()
        self.awaits_callback = False
        self.forward_root = None
        for unit in reversed(self.units):
            unit.modules_to_run.clear()
            if not unit.is_settled:
                unit.post_backward(keep=self.keeps_gathered)
            elif not self.keeps_gathered and not unit.is_pinned and unit.settings.reshard_after_backward:
                unit.reshard()  # it may have been recomputed, for others, when its own backward was over
        if self.is_last_backward or not self.streams.runs_ahead:  # else .grad would be set a backward late
            self.reductions.finish_all()
        if not self.is_last_backward:
            return
        self.starts_anew = True
        self.order.clear()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.gather.drop()
        self.streams.reclaim(keep=0)

    def reset(self) -> None:
        """Forget a failed iteration. Collective where gathers are under way: all ranks must have failed."""
        if self.awaits_callback:  # it failed in backward
            self.reductions.drop_all()
        self.reductions.finish_all()
        self.order.clear()
        self.undone.clear()
        self.open.clear()
        self.region = None
        self.forward_root = None
        self.awaits_callback = False
        for unit in self.units:
            unit.reset()

    def _finish_tapes(self) -> None:
        for tape in self.undone:
            self.undo(tape, tape.finish())

    def undo(self, tape: Tape, steps: Sequence[Step]) -> None:
        """Do in place of autograd what backward passes over. Collective over the mesh."""
        if tape not in self.undone:
            self._finish_tapes()  # of later forwards, which autograd visits before earlier ones
            _pass_over_before(tape, self)
            self.undone.append(tape)
        for boundary, region in steps:
            _go_into(region, self)
            if boundary is None:
                continue
            unit = self.units[boundary.unit]
            if boundary.is_end:
                self.begin_backward_of(unit)
            else:
                with outside_transforms():
                    unit.post_backward(keep=self.keeps_gathered)


def _pass_over_before(tape: Tape | None, tree: Tree) -> None:
    """Undo first the forwards of which other ranks' losses use something, and this one's nothing.

    A backward may also leave out a forward on all ranks, so they ask one another. Collective over the mesh.
    """
    if len(tree.open) < 2:
        return
    mine = tree.open.index(tape) + 1 if tape in tree.open else 0
    device = tree.root.policy.device
    axes = [bucket.spec.axes for unit in tree.units for bucket in unit.buckets]
    groups = groups_of(axes, device)
    while (latest := largest_of_ranks(mine, groups, device, "the forward that backward undoes")) > mine:
        passed = tree.open[latest - 1]
        tree.undone.append(passed)
        tree.undo(passed, passed.finish())


def _go_into(region: Region | None, tree: Tree) -> None:
    """Backward is in `region` now: free what was held for the one before, gather and hold all of this one."""
    if region is tree.region:
        return
    left, tree.region = tree.region, region
    for unit in _units_of(left, tree):
        unit.is_held = False
        is_needed = unit.in_backward or not unit.is_settled or unit.is_pinned or tree.keeps_gathered
        if unit.settings.reshard_after_backward and not is_needed:
            unit.reshard()
    entered = _units_of(region, tree)
    with outside_transforms():
        for unit in entered:
            unit.is_held = True
            unit.unshard()
        for unit in entered:
            unit.wait_for_unshard()


def _units_of(region: Region | None, tree: Tree) -> list[Unit]:
    return [] if region is None else [tree.units[index] for index in region.units]


def watch_grads(unit: Unit) -> None:
    """Notice gradients that come without a hook on an output, as they may while the unit is gathered."""
    for bucket in unit.buckets:
        for tensor in bucket.gather.tensors:
            if tensor.requires_grad and not has_grad_hooks(tensor):
                tensor.register_post_accumulate_grad_hook(_notice_hook(weakref.ref(unit)))


def managed_params() -> dict[int, str]:
    """Every sharded parameter's name by its id: torch cannot swap a tensor that is weakly referenced."""
    return {id(param.sharded): param.name for unit in _live_units for param in unit.params}


_live_units: weakref.WeakSet[Unit] = weakref.WeakSet()


def _fits(bucket: Bucket) -> bool:
    """Whether the parameters' present tensors are such as the bucket was made for."""
    flat, is_extended = bucket.gather.shard.flat, bucket.spec.is_extended
    return all(
        p.local.dtype == flat.dtype and p.local.device == flat.device and p.is_extended is is_extended
        for p in bucket.params
    )


def _trains(bucket: Bucket) -> bool:
    return any(param.sharded.requires_grad for param in bucket.params)


def _check_no_grads_wait(unit: Unit) -> None:
    if any(not bucket.grads.is_empty or bucket.grads.partial is not None for bucket in unit.buckets):
        raise RuntimeError(
            f"unit {unit.name!r}: its parameters were cast or moved while gradients of micro-batches without "
            "sync wait in another dtype or place. Do it after a synced backward."
        )


def _grad_hook(unit_ref: weakref.ref[Unit], bucket: Bucket, index: int) -> GradHook | None:
    """The hook that takes a gathered parameter's gradient as soon as autograd has accumulated it.

    None where the gradient waits for the unit's sweep.
    """
    if index in bucket.grads.swept:
        return None
    bucket_ref = weakref.ref(bucket)  # autograd keeps hooks where the garbage collector does not look

    def take_grad(param: Tensor) -> None:
        unit, bucket = unit_ref(), bucket_ref()
        if unit is None or bucket is None or param.grad is None:
            return
        tree = unit.tree
        tree.enter_backward()
        unit.is_settled = False
        tree.reductions.finish_of(bucket)
        if bucket.grads.is_empty:
            if tree.streams.runs_ahead and tree.reductions.is_full:
                return  # see [Note: rows of gradients]
            tree.reductions.make_room()
        grad, param.grad = param.grad, None
        with torch.no_grad():
            bucket.grads.add({index: grad})

    return take_grad


def _notice_hook(unit_ref: weakref.ref[Unit]) -> GradHook:
    """The hook that sees a backward come to a unit that stayed gathered, though it came by no output."""

    def notice(param: Tensor) -> None:
        unit = unit_ref()
        if unit is not None:
            unit.tree.enter_backward()
            unit.is_settled = False

    return notice
