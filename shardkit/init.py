"""From meta to numbers: allocate what has no bytes yet, initialise it, make replicas equal.

Level 14 of the data flow. `nn.Module.to_empty` empties everything, also tables that were computed when the
model was built; these functions touch only what is on the meta device. With one seed on all ranks, replicas
draw the same numbers and shards numbers of their own.

    build on meta -> fully_shard -> materialize_                     -> train
                                 -> allocate_ -> load a checkpoint   -> train
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import inner_tensors, local_of, new_dtensor, reset_function_of, spec_of
from shardkit.bucket import Bucket
from shardkit.collectives import broadcast
from shardkit.interop import units_in

_UNWRITTEN = 0xFF  # in every byte: nan in all floating-point dtypes, which no computation overlooks


def allocate_(model: nn.Module, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Give bytes to the parameters and buffers that are on meta, and leave alone what is real. Local.

    Their values are nan (all bits one) until they are loaded or initialised. Parameters stay the objects that
    an optimizer may hold.

    Args:
        device: where to; default: the mesh's, but the CPU for the parameters of offloaded units.
    Returns:
        What got bytes, by dotted name; something tied, by the first of its names.
    """
    units = units_in(model)
    usual = units[0].policy.device if units else torch.get_default_device()
    offloaded = {id(param.sharded) for unit in units if unit.policy.offloads for param in unit.params}
    on_meta = {name: tensor for name, tensor in _tensors(model).items() if tensor.is_meta}
    with torch.no_grad():
        for tensor in on_meta.values():
            place = device or ("cpu" if id(tensor) in offloaded else usual)
            torch.utils.swap_tensors(tensor, _with_bytes(tensor, place))
    for unit in units:
        unit.adopt()
    return on_meta


def materialize_(
    model: nn.Module,
    device: torch.device | str | None = None,
    init_fn: Callable[[nn.Module], object] | None = None,
) -> None:
    """Allocate what is on meta, and only that, and let the modules that own it initialise it. Local.

    Each of them is asked once, inner ones first, by its `reset_parameters`. Seed all ranks alike.

    Args:
        device: where to; default: the mesh's, but the CPU for the parameters of offloaded units.
        init_fn: called with each of these modules, instead of their `reset_parameters`. It initialises what
            the module itself owns, not what its children do.
    Raises:
        ValueError: a module can not initialise what it owns on meta (nothing has been allocated then), or has
            left something unwritten, such as a table that is computed in the constructor only.
    """
    calls = _initialisers(model, init_fn)
    allocated = allocate_(model, device)
    versions = {name: _version(tensor) for name, tensor in allocated.items()}
    with torch.no_grad():
        for call in calls:
            call()
    for unit in units_in(model):
        unit.adopt()
    now = _tensors(model)
    unwritten = [
        name
        for name, tensor in allocated.items()
        if now.get(name) is tensor and _version(tensor) == versions[name] and _is_unwritten(tensor)
    ]
    if unwritten:
        raise ValueError(
            f"materialize_: {unwritten} were on meta, and initialising their modules left them unwritten. "
            "Write them in reset_parameters or init_fn, or build them on the CPU: only what is on meta is "
            "touched."
        )


def broadcast_replicas_(model: nn.Module) -> None:
    """Give every replica of an HSDP mesh the parameters of the first one. Nothing where there is one only.

    One broadcast a bucket. Collective over the replicate axis: all ranks must call. Buffers stay as they are.

    Raises:
        ValueError: parameters are on meta.
    """
    for unit in units_in(model):
        unit.reshard()
        unit.adopt()
        for bucket in unit.buckets:
            if bucket.replicate_route is not None and bucket.spec.axes.replicate_size > 1:
                _broadcast(bucket)


def _broadcast(bucket: Bucket) -> None:
    route = bucket.replicate_route
    assert route is not None
    names = [param.name for param in bucket.params if param.local.is_meta]
    if names:
        raise ValueError(f"broadcast_replicas_: {names} are on meta. Call materialize_ on the model first.")
    own = [inner for p in bucket.params if p.is_extended for inner in inner_tensors(p.local)]
    with torch.no_grad():
        for flat in (bucket.gather.shard.flat, *own):
            sent = flat.to(bucket.spec.device)  # offloaded shards pass through the device of the group
            if sent.numel():
                broadcast(sent, route, bucket.label).wait()
            if sent is not flat:
                flat.copy_(sent)
    torch.autograd.graph.increment_version([param.sharded for param in bucket.params])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by the first of their dotted names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _initialisers(
    model: nn.Module, init_fn: Callable[[nn.Module], object] | None
) -> list[Callable[[], object]]:
    """What initialises each module that owns something on meta, deepest first."""
    calls: list[Callable[[], object]] = []
    lacking = []
    for name, module in _owners_of_meta(model).items():
        call = reset_function_of(module) if init_fn is None else partial(init_fn, module)
        if call is None:
            lacking.append(f"{name or 'the model'} ({type(module).__name__})")
        else:
            calls.append(call)
    if lacking:
        raise ValueError(
            f"materialize_: these modules own tensors on meta and have no reset_parameters: {lacking}. Pass "
            "init_fn, or call allocate_ and load a checkpoint."
        )
    return calls


def _owners_of_meta(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that own something on meta, deepest first; not where all of it is tied to an earlier one's."""
    owners: dict[str, nn.Module] = {}
    owned: set[int] = set()
    for name, module in sorted(model.named_modules(), key=_depth, reverse=True):
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        on_meta = {id(tensor) for _, tensor in tensors if tensor.is_meta}
        if on_meta - owned:
            owners[name] = module
            owned |= on_meta
    return owners


def _depth(named: tuple[str, nn.Module]) -> int:
    name, _ = named
    return name.count(".") + 1 if name else 0


def _with_bytes(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same kind of tensor with real, unwritten bytes."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    fresh = torch.empty_like(local, device=device, requires_grad=False)
    for inner in inner_tensors(fresh):
        torch.empty(0, dtype=torch.uint8, device=device).set_(inner.untyped_storage()).fill_(_UNWRITTEN)
    if isinstance(tensor, DTensor):
        fresh = new_dtensor(type(tensor), fresh, spec_of(tensor), requires_grad=False)
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold this rank's part of a tensor."""
    return inner_tensors(local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach())


def _version(tensor: Tensor) -> int:
    """Grows when the tensor is written to, though not when its `.data` is."""
    return tensor._version + sum(part._version for part in _parts(tensor))


def _is_unwritten(tensor: Tensor) -> bool:
    flats = [part.reshape(-1).view(torch.uint8) for part in _parts(tensor) if part.numel()]
    return bool(flats) and all(bool((flat == _UNWRITTEN).all()) for flat in flats)
