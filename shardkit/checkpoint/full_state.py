"""A full state dict, from rank 0 or held by all ranks, into models and optimizers of any layout.

Level 10 of the data flow. torch's loaders give a rank the whole tensor where a layout is ragged; these have
the same arguments and differ in three ways: every layout is cut by its own boxes, what the ranks expect is
compared before the first tensor is sent, so that a mismatch raises on all of them, and no rank holds more
than one full tensor at a time beside its shards:

    rank 0     names, shapes, dtypes ->  all ranks compare  ->  tensor 1 -> all, each keeps its part;  tensor
    2 .. a rank     its own shards + one full tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeGuard

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from shardkit.boxes import Layout, local_part
from shardkit.ragged import RaggedTensor

Path = tuple[str | int, ...]
Leaves = dict[Path, object]


class TensorFacts(NamedTuple):
    """What the other ranks must know of a tensor to receive it."""

    shape: torch.Size
    dtype: torch.dtype


class LoadResult(NamedTuple):
    """Keys that the model did not find, and keys it did not expect."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def set_model_state_dict(
    model: torch.nn.Module,
    model_state_dict: Mapping[str, object],
    *,
    options: StateDictOptions | None = None,
) -> LoadResult:
    """Load a model's state dict, as torch's function of this name, also into ragged layouts.

    Collective over the default group if `options.broadcast_from_rank0`: all ranks must call, and only rank
    0's dict is read. Parameters on the meta device are replaced by real ones of their dtype.

    Args:
        model: the model, sharded or not, on meta or not.
        model_state_dict: full tensors by fqn if `options.full_state_dict`; else sharded ones.
        options: as torch's.

    Raises:
        ValueError: on all ranks, if names (when `strict`) or shapes differ from what any rank expects.
    """
    options = options or StateDictOptions()
    if not options.full_state_dict:
        sharded = dict(model_state_dict)
        loaded = torch_state_dict.set_model_state_dict(model, sharded, options=options)  # type: ignore[arg-type]
        return LoadResult(list(loaded.missing_keys), list(loaded.unexpected_keys))
    raw_names = {name.replace("_orig_mod.", ""): name for name in model.state_dict()}
    own = model.state_dict()
    expected: Leaves = {(name,): own[raw] for name, raw in raw_names.items()}
    state = shard_full({(name,): value for name, value in model_state_dict.items()}, expected, options)
    on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in expected.values())
    by_raw_name = {raw_names.get(str(name), str(name)): value for (name,), value in state.items()}
    loaded = model.load_state_dict(by_raw_name, strict=options.strict, assign=on_meta)
    return LoadResult(list(loaded.missing_keys), list(loaded.unexpected_keys))


def set_optimizer_state_dict(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    optim_state_dict: Mapping[str, object],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load optimizers' state dict, as torch's function of this name, also into ragged layouts.

    Collective over the default group if `options.broadcast_from_rank0`: all ranks must call, and only rank
    0's dict is read.

    Args:
        model: the model whose parameters the optimizers hold.
        optimizers: one or several.
        optim_state_dict: full tensors if `options.full_state_dict`, in the form that torch's
            `get_optimizer_state_dict` gives under the same options; else sharded ones.
        options: as torch's.

    Raises:
        ValueError: on all ranks, if names (when `strict`) or shapes differ from what any rank expects.
    """
    options = options or StateDictOptions()
    optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    state: object = dict(optim_state_dict)
    if options.full_state_dict:
        sharded = replace(options, full_state_dict=False, broadcast_from_rank0=False, cpu_offload=False)
        expected = torch_state_dict.get_optimizer_state_dict(model, optimizers, options=sharded)
        loaded = shard_full(dict(_leaves(state)), dict(_leaves(expected)), options)
        state, options = _rebuilt(expected, loaded), sharded
    torch_state_dict.set_optimizer_state_dict(model, optimizers, state, options=options)  # type: ignore[arg-type]


def shard_full(full: Leaves, expected: Leaves, options: StateDictOptions) -> Leaves:
    """The entries of `full`, each tensor laid out as its namesake in `expected`, which this rank expects."""
    facts = {path: _facts(value) for path, value in full.items()}
    if options.broadcast_from_rank0:
        carrier = [facts]
        dist.broadcast_object_list(carrier, src=0)
        facts = carrier[0]
    _compare(facts, expected, options)
    state: Leaves = {}
    for path, fact in facts.items():
        value, wanted = full.get(path), expected.get(path)
        if isinstance(fact, TensorFacts):
            value = _received(value, fact) if options.broadcast_from_rank0 else value
        else:
            value = fact
        if isinstance(value, torch.Tensor) and isinstance(wanted, torch.Tensor):
            value = _laid_out(value, wanted)
            value = value.cpu() if options.cpu_offload else value
        if path in expected:
            state[path] = value
    return state


def _compare(facts: Leaves, expected: Leaves, options: StateDictOptions) -> None:
    """Raise on all ranks if what comes is not what some rank expects."""
    coming = {path for path, fact in facts.items() if isinstance(fact, TensorFacts)}
    problems = []
    for path, value in expected.items():
        fact = facts.get(path)
        if not _travels(value):
            continue
        if isinstance(fact, TensorFacts) and fact.shape != value.shape:
            problems.append(f"{_name(path)}: expected shape {tuple(value.shape)}, got {tuple(fact.shape)}")
        if path not in coming and options.strict:
            problems.append(f"{_name(path)}: expected, but missing")
    known = set(expected)
    if options.broadcast_from_rank0:
        everyone: list[tuple[list[str], set[Path]]] = [([], set()) for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, (problems, known))
        problems = list(dict.fromkeys(text for texts, _ in everyone for text in texts))
        known = set().union(*(paths for _, paths in everyone))
    if options.strict:
        problems += [f"{_name(path)}: not expected by any rank" for path in facts if path in coming - known]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise ValueError(
            "the full state dict does not fit; load one of this model, or pass strict=False if only names "
            "differ:\n  " + "\n  ".join(problems[:20] + more)
        )


def _received(value: object, fact: TensorFacts) -> torch.Tensor:
    """The full tensor of rank 0, on the device that the default group sends from."""
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    if dist.get_rank() == 0:
        assert isinstance(value, torch.Tensor)
        whole = value.detach().to(device).contiguous()
    else:
        whole = torch.empty(fact.shape, dtype=fact.dtype, device=device)
    dist.broadcast(whole, src=0)
    return whole


def _laid_out(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole` in the layout, dtype and device of `like`, if on meta the mesh's."""
    if not isinstance(like, DTensor):
        return whole.to(dtype=like.dtype, device=whole.device if like.is_meta else like.device)
    mesh, coordinate = like.device_mesh, like.device_mesh.get_coordinate()
    if coordinate is None:
        return like
    layout = Layout(tuple(like.shape), tuple(mesh.shape), like.placements)
    local = local_part(whole, layout, tuple(coordinate))
    local = local.to(dtype=like.dtype, device=mesh.device_type if like.is_meta else like.device)
    kind = RaggedTensor if isinstance(like, RaggedTensor) else DTensor
    return kind.from_local(local, mesh, like.placements, shape=like.shape, stride=like.stride())


def _facts(value: object) -> object:
    """What is sent first: a tensor's facts, or the value itself."""
    if _travels(value):
        return TensorFacts(value.shape, value.dtype)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _travels(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is sent as a tensor; those of no dims go with the names."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value of nested dicts and lists of dicts, by its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _rebuilt(like: object, values: Leaves, path: Path = ()) -> object:
    """`like` with the values found by path."""
    if isinstance(like, dict):
        return {key: _rebuilt(item, values, (*path, key)) for key, item in like.items()}
    if isinstance(like, list) and any(isinstance(item, dict) for item in like):
        return [_rebuilt(item, values, (*path, index)) for index, item in enumerate(like)]
    return values.get(path, like)


def _name(path: Path) -> str:
    return ".".join(map(str, path))
