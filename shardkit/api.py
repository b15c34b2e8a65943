"""`fully_shard` and `FSDPModule`: the public surface, as a table of contents.

Level 13 of the data flow. Arguments are checked and turned into a `Unit`; methods write a unit's settings or
call it. Call-compatible with torch's FSDP2: a program changes one import line.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.assemble import UnitPolicy
from shardkit.extension import refuse_pieces
from shardkit.hooks import install_hooks, leave_forward, post_forward, pre_forward
from shardkit.interop import UnitState, attach_unit, unit_of
from shardkit.mesh import DataAxes, DataParallelMeshDims, data_axes, default_mesh, device_of, shard_subgroup
from shardkit.module import FSDPModule, become_fsdp_module
from shardkit.params import PlacementFn, check_one_device, collect_params, modules_of_unit, move_to_device
from shardkit.shard_random import serve_cpu_shards
from shardkit.unit import Unit, managed_params
from shardkit.watch import watch_optimizers, watch_state_dicts

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: M,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shard a module's parameters over the mesh, in place; they are gathered just in time and reduced after
    use.

    Call it bottom-up: each call manages the parameters below `module` that no earlier call manages, as one
    unit. Names, structure, `isinstance` and hooks survive; parameters become DTensors. ZeRO-3 (Rajbhandari et
    al., 2020, section 5) with the factors of PyTorch FSDP (Zhao et al., 2023, section 3.2). Collective over
    the mesh: all its ranks must call, with the same arguments.

    Args:
        module: one module, or a list that makes one unit.
        mesh: 1-D (shard), 2-D named (replicate, shard), or any with `dp_mesh_dims`. Default: all ranks,
            sharded.
        reshard_after_forward: True frees gathered parameters after forward and gathers them again in
            backward; False keeps them until backward is over; None is True, but False for the root; n keeps
            1/n of them, so that backward gathers over n neighbouring ranks.
        shard_placement_fn: for each parameter `None` (`Shard(0)`), `Shard(dim)`, `Blocks(...)` (ragged: no
            block is cut and nothing is copied), or a `ShardPlacementResult` with a mesh of its own.
        mp_policy: dtypes of compute, reduction and output.
        offload_policy: `CPUOffloadPolicy` keeps shards, gradients and optimizer state on the CPU.
        ignored_params: parameters to leave alone: neither sharded, moved, nor reduced.
        dp_mesh_dims: which axes of `mesh` shard and replicate, where the parameters are DTensors on the whole
            mesh.
    Returns:
        `module`, which is an `FSDPModule` too.
    Raises:
        TypeError, ValueError: an argument or a parameter is not what it must be.
        NotImplementedError: a parameter needs what shardkit does not do.
    """
    modules = _check_modules(module)
    mesh = default_mesh() if mesh is None else mesh
    axes = data_axes(mesh, dp_mesh_dims)
    _check_reshard(reshard_after_forward, axes)
    _check_policy("mp_policy", mp_policy, MixedPrecisionPolicy)
    _check_policy("offload_policy", offload_policy, OffloadPolicy)
    device = device_of(mesh)
    policy = UnitPolicy(mp_policy or MixedPrecisionPolicy(), offload_policy or OffloadPolicy(), device)
    ignored = frozenset(ignored_params or ())
    _check_ignored(modules, ignored)
    managed = list(modules_of_unit(modules, lambda inner: unit_of(inner) is not None))
    specs = collect_params(managed, axes, shard_placement_fn, ignored, managed_params())
    move_to_device([*_buffers(managed), *((spec.name, spec.param) for spec in specs)], device)
    check_one_device(specs)
    if mesh.device_type == "cpu" or isinstance(offload_policy, CPUOffloadPolicy):
        serve_cpu_shards(mesh)
    unit = Unit(modules, managed, specs, policy)
    _set_reshard_after_forward(unit, reshard_after_forward)
    attach_unit(unit)
    inner = [found for root in modules for below in root.modules() if (found := unit_of(below)) is not None]
    unit.tree.absorb(inner, ignored)
    install_hooks(unit)
    watch_state_dicts(unit)
    watch_optimizers()
    for root in modules:
        become_fsdp_module(root)
    return module


class _StateGetter(Protocol):
    def __call__(self, module: nn.Module) -> UnitState | None: ...


def _state(module: nn.Module) -> UnitState | None:
    """The state of a sharded module, under the names that torch uses; `.unit` has settings and buckets."""
    unit = unit_of(module)
    return None if unit is None else UnitState(unit)


fully_shard.state = _state  # type: ignore[attr-defined]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name` gather and free parameters as `forward` does; nothing on a module that is not
    sharded.

    Raises:
        ValueError: the module has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}. Name one that it has.")

    @functools.wraps(method)
    def gathered(self: nn.Module, *args: object, **kwargs: object) -> object:
        try:
            args, kwargs = pre_forward(unit, self, args, kwargs)
            return post_forward(unit, self, method(*args, **kwargs))
        finally:
            leave_forward(unit)

    setattr(module, method_name, types.MethodType(gathered, module))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let several roots, as pipeline stages of one rank, use one set of streams.

    Raises:
        ValueError: a module is not sharded.
    """
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(
                f"share_comm_ctx: expected sharded modules, got a {type(module).__name__}. Call fully_shard "
                "on it first."
            )
        units.append(unit)
    for unit in units[1:]:
        unit.tree.streams = units[0].tree.streams


def _check_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of the call, those below another of them left out."""
    modules = (
        [module]
        if isinstance(module, nn.Module)
        else list(module)
        if isinstance(module, (list, tuple))
        else []
    )
    if not modules or not all(isinstance(root, nn.Module) for root in modules):
        raise TypeError(
            f"fully_shard: expected a module or a list of modules, got {_kind(module)}. Pass what has a "
            "forward."
        )
    for root in modules:
        if isinstance(root, (nn.ModuleList, nn.ModuleDict)) and type(root).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard: a {type(root).__name__} has no forward, so nothing would gather its "
                "parameters. Pass its modules, each by itself, or a list of them as one unit."
            )
        if unit_of(root) is not None:
            raise ValueError(
                f"fully_shard: it has been called on this {type(root).__name__} already. Call it once a "
                "module."
            )
    below = {id(inner) for root in modules for inner in root.modules() if inner is not root}
    return [root for root in dict.fromkeys(modules) if id(root) not in below]


def _kind(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {[type(item).__name__ for item in value]}"
    return f"a {type(value).__name__}"


def _buffers(managed: Iterable[tuple[str, nn.Module]]) -> Iterable[tuple[str, Tensor]]:
    for prefix, module in managed:
        yield from module.named_buffers(prefix=prefix, recurse=False)


def _check_reshard(setting: bool | int | None, axes: DataAxes) -> None:
    if setting is None or isinstance(setting, bool):
        return
    if not isinstance(setting, int):
        raise TypeError(
            f"reshard_after_forward={setting!r}: expected a bool, None or a number of ranks, got a "
            f"{type(setting).__name__}. Pass True to free parameters after forward."
        )
    if setting < 1 or axes.shard_size % setting:
        raise ValueError(
            f"reshard_after_forward={setting}: {setting} ranks do not divide the {axes.shard_size} ranks of "
            f"the shard axis. Choose a divisor of {axes.shard_size}, for example the ranks of one node."
        )


def _check_policy(argument: str, policy: object, kind: type) -> None:
    if policy is not None and not isinstance(policy, kind):
        raise TypeError(
            f"{argument}={policy!r}: expected a {kind.__name__}, got {_kind(policy)}. Pass an instance, for "
            f"example {kind.__name__}()."
        )


def _check_ignored(modules: Sequence[nn.Module], ignored: frozenset[object]) -> None:
    managed = managed_params()
    managed |= {id(p): name for root in modules for name, p in root.named_parameters() if id(p) in managed}
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"ignored_params: expected parameters, got {param!r}. Pass the parameters themselves, for "
                "example set(model.head.parameters())."
            )
        if id(param) in managed:
            raise ValueError(
                f"param {managed[id(param)]!r}: it is in ignored_params, but an inner unit has sharded it "
                "already. Name it in that unit's call too, or take it out of ignored_params."
            )


def _set_reshard_after_forward(unit: Unit, setting: bool | int | None) -> None:
    """A number of ranks needs groups; all of them and one of them are the same as True and False."""
    unit.settings.reshard_after_forward = setting
    if setting is None or isinstance(setting, bool):
        return
    extended = [param.name for param in unit.params if param.is_extended]
    if extended:
        refuse_pieces(extended)
    unit.settings.reshard_after_forward = setting
    for bucket in unit.buckets:
        axes = bucket.spec.axes
        if 1 < setting < axes.shard_size and axes.shard_size % setting == 0:
            bucket.gather.small_group = shard_subgroup(axes, setting)
    if all(bucket.gather.small_group is None for bucket in unit.buckets):
        unit.settings.reshard_after_forward = setting > 1
