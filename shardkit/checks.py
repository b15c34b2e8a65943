"""What is checked when an iteration begins: all parameters managed, all ranks agreed, all replicas equal.

Level 12 of the data flow. The first costs a look at every module a forward; the others are asked once, and
again when other parameters are trained.
"""

from __future__ import annotations

import warnings
import weakref
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import inner_tensors, without_torch_function
from shardkit.agreement import check_agreement, groups_of, groups_with_peers
from shardkit.bucket import Bucket
from shardkit.collectives import all_reduce_now
from shardkit.errors import PlanMismatchError
from shardkit.extension import has_extension
from shardkit.sharded_param import ShardedParam
from shardkit.unit import Tree, Unit

_checked: weakref.WeakKeyDictionary[Tree, list[int]] = weakref.WeakKeyDictionary()
# the choices of what trains, each with its number, the same on all ranks
_agreed: weakref.WeakKeyDictionary[Tree, dict[tuple[bool, ...], int]] = weakref.WeakKeyDictionary()
# the largest number that a rank chose, and minus the smallest; when they are there
_asked: weakref.WeakKeyDictionary[Tree, tuple[Tensor, torch.Event | None]] = weakref.WeakKeyDictionary()


def check_all_managed(tree: Tree) -> None:
    """Refuse trainable parameters that were added after sharding: nothing would reduce their gradients.

    Raises:
        ValueError: there is one, and it was not in `ignored_params`.
    """
    attributes = [names_and_children for unit in tree.units for names_and_children in unit.attributes]
    seen = [*map(len, attributes), *map(id, chain.from_iterable(attributes))]
    if seen == _checked.get(tree):
        return
    params = [param for unit in tree.units for param in unit.params]
    managed = {id(form) for param in params for form in (param.sharded, param.unsharded)} | tree.ignored
    # what was put in a parameter's place is `Unit.adopt`'s to judge
    places = {(id(owner.module), owner.name) for param in params for owner in param.owners}
    modules = [named for root in tree.root.modules for named in root.named_modules()]
    for prefix, module in modules:
        for name, param in module.named_parameters(prefix, recurse=False):
            is_ours = id(param) in managed or isinstance(param, DTensor)
            if param.requires_grad and not is_ours and (id(module), name.rpartition(".")[2]) not in places:
                raise ValueError(
                    f"param {name!r}: it was added after fully_shard, so it is not sharded and its gradient "
                    "would differ on every rank. Add it before, call fully_shard on its module, or name it "
                    "in ignored_params and reduce it yourself."
                )
    _checked[tree] = seen


def check_ranks_agree(tree: Tree) -> None:
    """Once, compare plans, and the replicas' weights, over every group that will communicate.

    Once more, compare what is trained, for every choice of parameters that `requires_grad_` made since: rows
    of gradients hold what is trained, so ranks that disagree would add gradients of different parameters.
    Once there are several choices, their numbers are compared in every forward with grad. That is one
    all-reduce of two numbers; where the host runs ahead it does not wait for it, and the next forward has the
    answer.

    Collective over the data-parallel axes: all ranks must call.

    Raises:
        PlanMismatchError: ranks planned different shards, or train different parameters, or a rank did not
            come.
    """
    trained = _trained(tree)
    if (known := _agreed.get(tree)) is not None:
        if len(known) > 1:
            _check_answer(tree)
        if trained not in known:
            _check_same_trained(tree, trained)
            known[trained] = len(known)
        elif len(known) > 1 and torch.is_grad_enabled():
            _compare_number(tree, known[trained])
        return
    _agreed[tree] = {trained: 0}
    buckets = [bucket for unit in tree.units for bucket in unit.buckets]
    model = _named(tree)
    lines = [line for unit in tree.units for line in _describe(unit)]
    lines += [
        "no further parameter",
        *(f"{b.label}: {line}" for b in buckets for line in b.spec.layout.describe()),
    ]
    lines += [
        f"unit {u.name!r}: reshard_after_forward={u.settings.reshard_after_forward}" for u in tree.units
    ]
    device = tree.root.policy.device
    replicas = groups_with_peers([bucket.spec.axes.replicate_group for bucket in buckets], device)
    for group in groups_with_peers([bucket.spec.axes.shard_group for bucket in buckets], device) + replicas:
        check_agreement(lines, group, model)
    for group in replicas:
        ours = [bucket for bucket in buckets if bucket.spec.axes.replicate_group is group]
        try:
            check_agreement([f"{bucket.label}: {_checksum(bucket)}" for bucket in ours], group, model)
        except PlanMismatchError:
            warnings.warn(
                f"{model}: the replicas of an HSDP mesh start from different weights, so they would train "
                "different models. Seed all ranks alike, or call broadcast_replicas_(model).",
                stacklevel=2,
            )


def _check_same_trained(tree: Tree, trained: tuple[bool, ...]) -> None:
    params = [param for unit in tree.units for param in unit.params]
    lines = [f"{param.name}: requires_grad={wants}" for param, wants in zip(params, trained, strict=True)]
    try:
        for group in _groups(tree):
            check_agreement(lines, group, _named(tree))
    except PlanMismatchError as error:
        raise PlanMismatchError(
            f"{_named(tree)}: requires_grad was switched after the first forward, and not alike on all "
            "ranks, so that gradients of different parameters would be added. Switch the same parameters on "
            f"every rank, before the same forward. As found: {error}"
        ) from error


def _compare_number(tree: Tree, number: int) -> None:
    groups = _groups(tree)
    if not groups:
        return
    with tree.streams.after(tree.streams.all_reduce):  # the last answer, whose bytes these may be, is read
        bounds = torch.full((2,), number, device=tree.root.policy.device)
        bounds[1].neg_()
        for group in groups:
            all_reduce_now(bounds, group, _named(tree), dist.ReduceOp.MAX)
        _asked[tree] = bounds.to("cpu", non_blocking=True), tree.streams.mark()
    if not tree.streams.runs_ahead:
        _check_answer(tree)


def _check_answer(tree: Tree) -> None:
    """Raise what the last comparison found."""
    bounds, event = _asked.pop(tree, (None, None))
    if bounds is None:
        return
    if event is not None:
        event.synchronize()
    largest, smallest = (abs(number) for number in bounds.tolist())
    if largest == smallest:
        return
    choices = list(_agreed[tree])
    params = [param for unit in tree.units for param in unit.params]
    both = zip(params, choices[largest], choices[smallest], strict=True)
    names = [param.name for param, one, other in both if one != other]
    raise PlanMismatchError(
        f"{_named(tree)}: some ranks train {names[0]!r} and others do not, of {names} that differ, so that "
        "gradients of different parameters would be added. Switch requires_grad alike on every rank, before "
        "the same forward."
    )


def _trained(tree: Tree) -> tuple[bool, ...]:
    """Of every parameter, in the form that the modules hold, whether it requires a gradient."""
    places = [param.places[0] for unit in tree.units for param in unit.params]
    with without_torch_function():
        held = [of_module.get(name) for of_module, name in places]
        return tuple([param is not None and param.requires_grad for param in held])


def _groups(tree: Tree) -> list[dist.ProcessGroup]:
    axes = [bucket.spec.axes for unit in tree.units for bucket in unit.buckets]
    return groups_of(axes, tree.root.policy.device)


def _named(tree: Tree) -> str:
    return f"model {type(tree.root.modules[0]).__name__!r}"


def _describe(unit: Unit) -> list[str]:
    """What each parameter is, whatever lies beside it: one that differs moves others, and is to be named."""
    of_param = {id(param): bucket.spec for bucket in unit.buckets for param in bucket.params}
    lines = []
    for param in unit.params:
        spec = of_param[id(param)]
        lines.append(
            f"unit {unit.name!r}: {param.name}: {param.shape} {_placed(param)}, {spec.dtype} computed in "
            f"{spec.compute_dtype}, reduced in {spec.reduce_dtype}, "
            + ("trained" if param.sharded.requires_grad else "frozen")
            + (", with fsdp_pre_all_gather" if has_extension(param.name, param.local) else "")
        )
    return lines


def _placed(param: ShardedParam) -> str:
    if param.plan is None:
        return f"cut along dim {param.shard_dim}"
    return f"in blocks of {param.plan.blocks[param.plan_name]} elements"


def _checksum(bucket: Bucket) -> int:
    """A number that differs where the shard's bytes do, almost surely. Waits for the device."""
    locals_ = [param.local for param in bucket.params if param.is_extended]
    total = 0
    for tensor in (bucket.gather.shard.flat, *(inner for t in locals_ for inner in inner_tensors(t))):
        flat = tensor.reshape(-1).view(torch.uint8)
        words = flat[: flat.numel() // 4 * 4].view(torch.int32).to(torch.int64)
        total += int((words * torch.arange(1, words.numel() + 1, device=words.device)).sum())
    return total
