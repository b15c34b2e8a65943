"""What triggers a unit: module hooks around forward, autograd hooks around backward.

Level 14 of the data flow. Every subtlety of autograd and nn.Module is on this page; what is then done is in
`unit.py`, and when, in `schedule.py`.

    pre_forward    gather, wait, prefetch what the user listed; a node on the inputs will call post_backward
    post_forward   reshard, note the order; hooks on the outputs will call pre_backward
    pre_backward   gather, wait, prefetch the unit that ran before
    post_backward  take gradients, reshard, reduce
    end_backward   the same for units whose inputs needed no gradient; wait for all reductions

Where ranks may use different units, a `Tape` of forward says what a backward passes over, and that is
gathered and reduced as well.

[Note: recomputation]
Activation checkpointing runs forward again inside backward. If the unit's backward has begun (non-reentrant,
the graph of the first forward lives on), the recomputed forward only needs the parameters gathered. If it has
not (reentrant, the first forward ran without grad), it builds the graph that backward will use, so it gets
hooks like any other, but neither reshards nor enters the order: its backward follows at once. Where ranks may
use different units, forward notes what runs inside a checkpoint: ranks that pass over it gather that too.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._torch import (
    base_made_since,
    in_backward,
    is_transformed,
    outside_transforms,
    pack_hooks,
    sequence_number,
    without_dynamo,
)
from shardkit.checks import check_all_managed, check_ranks_agree
from shardkit.containers import find_tensors, map_tensors
from shardkit.precision import cast_floating
from shardkit.schedule import Boundary, Tape, reshards_after_forward
from shardkit.unit import Unit, watch_grads

Args = tuple[object, ...]
Kwargs = dict[str, object]


def install_hooks(unit: Unit) -> None:
    """Let the unit's modules gather before forward and free after it."""

    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return pre_forward(unit, module, args, kwargs)

    def after(module: nn.Module, args: Args, output: object) -> object:
        return post_forward(unit, module, output)

    def after_all(module: nn.Module, args: Args, output: object) -> None:
        leave_forward(unit)

    for module in unit.modules:
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)
        module.register_forward_hook(after_all, always_call=True)  # no exception leaves it entered


@without_dynamo
def pre_forward(unit: Unit, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Gather the unit's parameters and cast the inputs. Collective over the shard axis."""
    recomputing = in_backward() and unit.in_backward  # see [Note: recomputation]
    first = not recomputing and unit.depth == 0 and (len(unit.modules) == 1 or not unit.modules_to_run)
    if first:
        args, kwargs = _begin_iteration(unit, args, kwargs)
        unit.modules_to_run = set(unit.modules)
        unit.expects_backward = False
        unit.first_node = sequence_number()
    unit.depth += 1
    if unit.settings.reduce.fill_unused:
        _follow_checkpoints(unit)
    precision = unit.policy.precision
    if precision.cast_forward_inputs and precision.param_dtype is not None:
        args = cast_floating(args, precision.param_dtype)  # type: ignore[assignment]
        kwargs = cast_floating(kwargs, precision.param_dtype)  # type: ignore[assignment]
    with outside_transforms():
        unit.unshard()
        unit.wait_for_unshard()
    if first:
        for other in unit.settings.forward_prefetch:
            other.unshard()
        args, kwargs = _call_after_input_grads(unit, args, kwargs)
    return args, kwargs


@without_dynamo
def post_forward(unit: Unit, module: nn.Module, output: object) -> object:
    """Free the unit's parameters where the schedule says so, and cast the outputs."""
    recomputing = in_backward()
    if not (recomputing and unit.in_backward):
        _call_before_output_grads(unit, output)
        if unit.depth == 1:
            unit.modules_to_run.discard(module)
            if not unit.modules_to_run and not recomputing:
                _complete_forward(unit)
            elif not recomputing and unit.settings.reduce.fill_unused:
                _record_end(unit, with_grad=False)
    if unit.depth == 1 and not recomputing and unit.tree.forward_root is unit and not unit.modules_to_run:
        _end_iteration(unit)
    dtype = unit.policy.precision.output_dtype
    return output if dtype is None else cast_floating(output, dtype)


def leave_forward(unit: Unit) -> None:
    """A forward of the unit is over, or has failed."""
    unit.depth = max(0, unit.depth - 1)


@without_dynamo
def pre_backward(unit: Unit, tape: Tape | None, grad: Tensor) -> Tensor:
    """Gather the unit's parameters for its backward, and prefetch. Collective over the shard axis.

    Args:
        tape: of the forward, where all ranks undo it alike.
    """
    tree = unit.tree
    tree.enter_backward()
    tree.keeps_gathered |= torch.is_grad_enabled()  # create_graph: see Tree.keeps_gathered
    if not unit.in_backward:
        if tape is not None:
            tree.visit(tape, Boundary(tree.index(unit), is_end=True))
        tree.begin_backward_of(unit)
    return grad


class PostBackward(torch.autograd.Function):
    """Identity on a unit's inputs whose backward runs when the gradients of all of them are computed."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, tape: Tape | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.tape = unit, tape
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _post_backward(ctx.unit, ctx.tape)
        return (None, None, *grads)


class TransformedPostBackward(PostBackward):
    """The same in the form that torch.func asks for; to call it takes three times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(unit: Unit, tape: Tape | None, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.unit, ctx.tape = inputs[:2]

    @staticmethod
    def jvp(ctx: Any, unit: object, tape: object, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tangents


@without_dynamo
def _post_backward(unit: Unit, tape: Tape | None) -> None:
    if tape is not None:
        unit.tree.visit(tape, Boundary(unit.tree.index(unit), is_end=False))
    with outside_transforms():
        unit.post_backward(keep=torch.is_grad_enabled())


class Checkpoints(NamedTuple):
    """The outermost activation checkpoints around what runs now; None where there is no such one."""

    non_reentrant: object | None  # the hook that packs what it saves
    reentrant: object | None  # the context of the autograd function in whose forward all runs without a graph


def checkpoints_around() -> Checkpoints:
    """What will run again inside backward."""
    packs = [pack for pack in pack_hooks() if pack.__module__ == torch.utils.checkpoint.__name__]
    reentrant = None if torch.is_grad_enabled() else _function_around()
    return Checkpoints(packs[0] if packs else None, reentrant)


def _function_around() -> FunctionCtx | None:
    found, frame = None, inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "ctx":
            context = frame.f_locals.get("ctx")
            found = context if isinstance(context, FunctionCtx) else found
        frame = frame.f_back
    return found


def _follow_checkpoints(unit: Unit) -> None:
    """Note that a forward will run again inside backward; when it does, gather as ranks that skip it do."""
    tree, index = unit.tree, unit.tree.index(unit)
    if in_backward():
        if not unit.is_held:
            tree.rerun(unit)
        return
    checkpoints = checkpoints_around()
    if any(checkpoint is not None for checkpoint in checkpoints):
        tree.tape.rerun_later(index, checkpoints)
        if unit.depth == 1 and checkpoints.reentrant is not None:  # what runs again will find it on the tape
            tree.tape.record(Boundary(index, is_end=False), checkpoints)


def _begin_iteration(unit: Unit, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """What the outermost unit does first: clear up after a failure, check, order after the optimizer."""
    tree = unit.tree
    if in_backward():
        return args, kwargs
    if tree.awaits_callback or (tree.forward_root is unit):
        tree.reset()  # the last iteration ended in an exception
    if tree.forward_root is not None:
        return args, kwargs
    if len(unit.modules) > 1 and unit.is_root:
        raise RuntimeError(
            f"{unit.name}: a list of modules ran forward without a root above it. Call fully_shard on the "
            "module that holds them, last."
        )
    tree.forward_root = unit
    tree.tape = Tape()
    if tree.starts_anew:
        tree.starts_anew = False
        tree.open.clear()
    for other in tree.units:
        other.begin_iteration()
    tree.reductions.check_use()
    check_all_managed(tree)
    check_ranks_agree(tree)
    event, tree.post_optim_event = tree.post_optim_event, None
    tree.streams.gather_after(event)
    device = unit.policy.device
    if device.type == "cpu":
        return args, kwargs

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    return map_tensors(to_device, args), map_tensors(to_device, kwargs)


def _complete_forward(unit: Unit) -> None:
    """All modules of the unit have run: free it or keep it, and let backward know that it was here."""
    setting = unit.settings.reshard_after_forward
    with_grad = unit.expects_backward
    if unit.tree.halves_backward and unit.is_lent:
        setting = False
    if reshards_after_forward(setting, is_root=unit.is_root, with_grad=with_grad, pinned=unit.is_pinned):
        unit.reshard_after_forward()
    elif with_grad:
        watch_grads(unit)
    if with_grad:
        unit.tree.order.record(unit.tree.index(unit))
    if unit.settings.reduce.fill_unused:
        _record_end(unit, with_grad=with_grad)


def _record_end(unit: Unit, *, with_grad: bool) -> None:
    """One with a gradient when all modules have run, and for each module that runs again by itself."""
    checkpoints = checkpoints_around()
    if with_grad or checkpoints.reentrant is not None:
        unit.tree.tape.record(Boundary(unit.tree.index(unit), is_end=True), checkpoints)


def _end_iteration(root: Unit) -> None:
    """The outermost forward is over: complete units that it ran in part, drop gathers that nobody used."""
    tree = root.tree
    tree.forward_root = None
    for unit in tree.units:
        if unit.modules_to_run:
            unit.modules_to_run.clear()
            _complete_forward(unit)
        if not root.expects_backward and not unit.is_pinned:
            for bucket in unit.buckets:
                bucket.gather.drop()
    if not tree.tape.is_empty:
        tree.open.append(tree.tape)


def _call_after_input_grads(unit: Unit, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Put one PostBackward node on all inputs that need a gradient."""
    if not torch.is_grad_enabled():
        return args, kwargs
    found = find_tensors((args, kwargs) if kwargs else args)
    inputs = {id(tensor): tensor for tensor in found if tensor.requires_grad}
    if not inputs:
        return args, kwargs
    if (tape := _tape_of(unit)) is not None and not in_backward():
        tape.record(Boundary(unit.tree.index(unit), is_end=False), checkpoints_around())
    node = TransformedPostBackward if is_transformed() else PostBackward
    outputs = node.apply(unit, tape, *inputs.values())  # type: ignore[no-untyped-call]
    output_of: dict[int, Tensor] = dict(zip(inputs, outputs, strict=True))

    def replace(tensor: Tensor) -> Tensor:
        return output_of.get(id(tensor), tensor)

    return map_tensors(replace, args), map_tensors(replace, kwargs) if kwargs else kwargs


def _tape_of(unit: Unit) -> Tape | None:
    """Where backward follows this forward: none where ranks may not differ."""
    if not unit.settings.reduce.fill_unused:
        return None
    if in_backward():
        return unit.tree.undone[-1] if unit.is_held else None
    return unit.tree.tape


_hooked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors kept on modules -> True


def _call_before_output_grads(unit: Unit, output: object) -> None:
    """Gather when the gradient of an output, or of a tensor that the modules kept for the loss, arrives."""
    if not torch.is_grad_enabled():
        return

    tape = _tape_of(unit)

    def hook(grad: Tensor) -> Tensor:
        return pre_backward(unit, tape, grad)

    for tensor in find_tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)
            if (base := base_made_since(unit.first_node, tensor)) is not None:
                base.register_hook(hook)  # the view's own hook is lost when the user writes to it
            unit.expects_backward = True
    for value in unit.kept.find():
        if value not in _hooked:
            _hooked[value] = True
            value.register_hook(hook)
            unit.expects_backward = True
