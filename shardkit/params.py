"""Which parameters a unit manages: names, owners, ties, and what each one asks for.

Level 2 of the data flow. Takes the modules of one `fully_shard` call; gives one `ParamSpec` a parameter,
after every check that a caller can fail. Everything wrong is said here, on every rank, before anything is
moved or sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from shardkit._torch import ShardPlacementResult, is_replicated_module, local_of, wraps_tensors
from shardkit.extension import has_extension
from shardkit.mesh import DataAxes, axes_of_mesh_info
from shardkit.placement import Blocks

PlacementFn = Callable[[nn.Parameter], "Shard | Blocks | ShardPlacementResult | None"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A module attribute that holds the parameter; a tied parameter has several."""

    module: nn.Module
    name: str


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the user made it, and where it wishes to lie."""

    name: str
    owners: tuple[Owner, ...]
    param: nn.Parameter
    axes: DataAxes
    wish: Shard | Blocks

    @property
    def local(self) -> Tensor:
        """What the data-parallel axes divide: the parameter, or its part on this tensor-parallel rank."""
        return local_of(self.param) if isinstance(self.param, DTensor) else self.param.data


_manager_of: WeakTensorKeyDictionary = (
    WeakTensorKeyDictionary()
)  # a parameter as it was before sharding -> its name


def collect_params(
    modules: Iterable[tuple[str, nn.Module]],
    axes: DataAxes,
    placement_fn: PlacementFn | None,
    ignored: frozenset[nn.Parameter],
    managed: Mapping[int, str],
) -> list[ParamSpec]:
    """The parameters directly on `modules` (name, module), each once, in definition order.

    Args:
        managed: the names of the parameters that other units manage, by id.
    Raises:
        ValueError: a parameter is 0-dim, is managed by another unit, or has no dim that the placement names.
        NotImplementedError: it is not contiguous, or a dim other than 0 does not divide evenly.
        TypeError: `placement_fn` returned something else than a placement.
    """
    found: dict[int, tuple[str, nn.Parameter, list[Owner]]] = {}
    for prefix, module in modules:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in ignored:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            found.setdefault(id(param), (full_name, param, []))[2].append(Owner(module, name))
    specs = []
    for full_name, param, owners in found.values():
        _check_param(full_name, param, managed.get(id(param)) or _manager_of.get(param))
        wish, param_axes = _resolve_placement(full_name, param, axes, placement_fn)
        spec = ParamSpec(full_name, tuple(owners), param, param_axes, wish)
        _check_wish(spec)
        specs.append(spec)
    return specs


def modules_of_unit(
    roots: Sequence[nn.Module], is_sharded: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every module of the unit: all below `roots` that no inner unit, and no `replicate`,
    manages.

    Names are below the root; with several roots they start with the root's class and number, as nothing names
    it yet.
    """
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or is_replicated_module(module) or (is_sharded(module) and module not in roots):
            return
        seen.add(module)
        yield prefix, module
        for name, child in module.named_children():
            yield from walk(f"{prefix}.{name}" if prefix else name, child)

    for number, root in enumerate(roots):
        yield from walk("" if len(roots) == 1 else f"{type(root).__name__}{number}", root)


def remember_original(param: Tensor, name: str) -> None:
    """Note that `param` has been sharded, so that a unit that meets it, tied, can say who manages it."""
    _manager_of[param] = name


def name_before_sharding(param: Tensor) -> str | None:
    """The name of the sharded parameter that took the place of `param`, if one did."""
    name: str | None = _manager_of.get(param)
    return name


def move_to_device(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Move what the user left on the CPU, in place; meta tensors wait for `to_empty`.

    Raises:
        ValueError: a tensor is on a device that is neither the CPU nor the mesh's.
    """
    for name, tensor in tensors:
        if tensor.device == device or tensor.device.type == "meta" or isinstance(tensor, DTensor):
            continue
        if tensor.device.type != "cpu":
            raise ValueError(
                f"param {name!r}: expected it on {device}, the mesh's device, or on the CPU, got "
                f"{tensor.device}. Move the module, or pass a mesh of its device."
            )
        if wraps_tensors(tensor):  # `.data` would leave the tensors inside where they are
            moved = tensor.to(device)
            is_param = isinstance(tensor, nn.Parameter)
            torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if is_param else moved)
        else:
            tensor.data = tensor.to(device)


def check_one_device(specs: Sequence[ParamSpec]) -> None:
    """Either everything in a unit is on meta, or nothing.

    Raises:
        ValueError: some parameters are on meta and others are real.
    """
    on_meta = [spec.name for spec in specs if spec.param.is_meta]
    real = [spec.name for spec in specs if not spec.param.is_meta]
    if on_meta and real:
        raise ValueError(
            f"param {on_meta[0]!r}: it is on meta while param {real[0]!r} of the same unit is real. Build "
            "the whole unit under torch.device('meta'), or none of it."
        )


def _check_param(name: str, param: nn.Parameter, manager: str | None) -> None:
    if manager is not None:
        raise ValueError(
            f"param {name!r}: it is shared with {manager!r}, which another fully_shard unit manages already. "
            "Put the modules that share it into one unit: fully_shard([module_a, module_b])."
        )
    if param.ndim == 0:
        raise ValueError(
            f"param {name!r}: a 0-dim parameter has no dim to shard. Make it 1-D with one element, "
            f"nn.Parameter({name.rpartition('.')[2]}.reshape(1)), or pass it in ignored_params and reduce "
            "its gradient yourself."
        )
    local = local_of(param) if isinstance(param, DTensor) else param
    if wraps_tensors(local) and not has_extension(name, local):
        raise TypeError(
            f"param {name!r}: its {type(local).__name__} wraps tensors of its own and does not say how to "
            "gather them. Define fsdp_pre_all_gather and fsdp_post_all_gather on the class, or pass the "
            "parameter in ignored_params."
        )
    if not local.is_contiguous():
        raise NotImplementedError(
            f"param {name!r}: shape {tuple(param.shape)} with strides {local.stride()} is not contiguous. "
            "Call .contiguous() on it before fully_shard (channels_last weights may be converted in forward)."
        )
    if param.grad_dtype not in (None, param.dtype):
        warnings.warn(
            f"param {name!r}: its grad_dtype {param.grad_dtype} does not survive fully_shard, as with "
            "torch's. Gradients are reduced in the policy's reduce_dtype and end in the parameter's own, "
            f"{param.dtype}. Set MixedPrecisionPolicy(reduce_dtype=..), or cast the parameter.",
            stacklevel=2,
        )


def _resolve_placement(
    name: str, param: nn.Parameter, axes: DataAxes, placement_fn: PlacementFn | None
) -> tuple[Shard | Blocks, DataAxes]:
    answer = None if placement_fn is None else placement_fn(param)
    result = answer.placement if isinstance(answer, ShardPlacementResult) else answer
    if isinstance(answer, ShardPlacementResult):
        axes = axes_of_mesh_info(answer.mesh_info)
    if result is None:
        return Shard(0), axes
    if isinstance(result, Blocks):
        return result, axes
    if isinstance(result, Shard):
        return (Shard(result.dim + param.ndim) if result.dim < 0 else result), axes
    raise TypeError(
        f"param {name!r}: shard_placement_fn returned {result!r}. Return None, Shard(dim), a Blocks wish, or "
        "a ShardPlacementResult."
    )


def _check_wish(spec: ParamSpec) -> None:
    if isinstance(spec.wish, Blocks):
        return
    dim, shape, num_ranks = spec.wish.dim, tuple(spec.local.shape), spec.axes.shard_size
    if not 0 <= dim < len(shape):
        raise ValueError(
            f"param {spec.name!r}: Shard({dim}) names no dim of shape {shape}. Use a dim from 0 to "
            f"{len(shape) - 1}."
        )
    if dim > 0 and shape[dim] % num_ranks:
        raise NotImplementedError(
            f"param {spec.name!r}: dim {dim} of shape {shape} does not divide evenly over {num_ranks} ranks; "
            "only dim 0 may be uneven. Use Shard(0), or Blocks() for a layout without padding."
        )
