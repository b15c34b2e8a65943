"""wrap_policy: shard a model in one call, for people who come from FSDP1's `auto_wrap_policy`.

Level 14 of the data flow: decides which modules become units, and calls `fully_shard` on each, innermost
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict, TypeVar, Unpack

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardkit.api import fully_shard
from shardkit.interop import unit_of
from shardkit.mesh import DataParallelMeshDims
from shardkit.params import PlacementFn

M = TypeVar("M", bound=nn.Module)

# Their forward reads the weights of their children without calling these, so nothing would gather them.
_READS_ITS_CHILDREN = (nn.MultiheadAttention,)


class ShardOptions(TypedDict, total=False):
    """The keywords of `fully_shard`, for every unit alike."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    ignored_params: Iterable[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None


def wrap_policy(
    model: M,
    mesh: DeviceMesh | None = None,
    *,
    classes: Iterable[type[nn.Module]] = (),
    min_numel: int | None = None,
    **options: Unpack[ShardOptions],
) -> M:
    """Call `fully_shard` on the modules that a rule names, innermost first, and then on the model.

    A module that occurs several times is one unit. Modules without a forward of their own, such as
    ModuleList, are passed over and their children considered; what is sharded already is left as it is.
    Collective over the mesh, as `fully_shard` is: all ranks must call, with the same arguments.

        wrap_policy(model, mesh, classes={Block})             # FSDP1's transformer_auto_wrap_policy
        wrap_policy(model, mesh, min_numel=100_000_000)       # FSDP1's size_based_auto_wrap_policy

    Args:
        classes: instances of these, subclasses included, become units.
        min_numel: a module becomes a unit when its parameters in no unit yet have this many elements.
        options: keywords of `fully_shard`, given to every call.
    Returns:
        `model`.
    Raises:
        ValueError: no rule was given, no module is of a class that was, or a parameter is tied across units.
        TypeError: `classes` holds something else than module classes.
    """
    chosen_classes = _check_classes(classes)
    ignored = frozenset(options.get("ignored_params") or ())
    if ignored:
        options["ignored_params"] = ignored  # an iterator would be spent by the first unit
    if not chosen_classes and min_numel is None:
        raise ValueError("wrap_policy: neither classes nor min_numel is given. Pass the class of the blocks.")
    if min_numel is not None and min_numel < 1:
        raise ValueError(f"wrap_policy: min_numel={min_numel}: expected a positive number of elements.")
    units = choose_units(model, chosen_classes, min_numel, ignored)
    for cls in chosen_classes:
        if not any(isinstance(module, cls) for module in (*units, model)):
            raise ValueError(
                f"wrap_policy: no module of this {type(model).__name__} that could be a unit is a "
                f"{cls.__name__}. Name the class of its repeated blocks; print(model) shows it."
            )
    _check_ties(model, units, ignored)
    for module in units:
        fully_shard(module, mesh, **options)
    return fully_shard(model, mesh, **options)


def choose_units(
    model: nn.Module,
    classes: tuple[type[nn.Module], ...] = (),
    min_numel: int | None = None,
    ignored: frozenset[nn.Parameter] = frozenset(),
) -> list[nn.Module]:
    """The modules below `model` that become units, innermost first; `model` itself is left out."""
    units: list[nn.Module] = []
    seen: set[nn.Module] = {model}
    in_units = set(ignored)

    def visit(module: nn.Module) -> None:
        if isinstance(module, _READS_ITS_CHILDREN):
            return
        for child in module.children():
            if child in seen or unit_of(child) is not None:
                continue
            seen.add(child)
            visit(child)
            params = set(child.parameters()) - in_units
            is_large = min_numel is not None and sum(param.numel() for param in params) >= min_numel
            has_forward = type(child).forward is not nn.Module.forward
            if has_forward and (is_large or isinstance(child, classes)):
                units.append(child)
                in_units.update(params)

    visit(model)
    return units


def _check_classes(classes: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    if isinstance(classes, type):
        raise TypeError(
            f"wrap_policy: classes: expected several, got {classes!r}. Pass {{{classes.__name__}}}."
        )
    checked = tuple(classes)
    for cls in checked:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"wrap_policy: classes: expected module classes, got {cls!r}. Pass the type itself."
            )
    return checked


def _check_ties(model: nn.Module, units: Sequence[nn.Module], ignored: frozenset[nn.Parameter]) -> None:
    """Refuse a parameter of two units while the model is whole, so that both of its names can be told."""
    unit_with: dict[nn.Module, nn.Module] = {}
    for unit in (model, *reversed(units)):  # inner ones override those around them
        unit_with.update(dict.fromkeys(unit.modules(), unit))
    found: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            first_name, first_unit = found.setdefault(param, (full_name, unit_with[module]))
            if first_unit is not unit_with[module] and param not in ignored:
                raise ValueError(
                    f"param {full_name!r}: it is tied to {first_name!r}, and the rule puts them into two "
                    "units, where they would become two weights. Leave both modules to the model's own unit, "
                    "or call fully_shard([module_a, module_b]) on them first."
                )
