"""Random training programs: a model, how it is sharded and how it is trained, as one value.

A `Program` prints as the expression that makes it, so a failing one can be pasted into a test. `draw()`
draws them; `build()` makes the unsharded model, with the same weights on every call, and `shard()` wraps it.

Every module maps rows (num_rows, width) to rows of the same width, so any tree of them is a model. Values
between modules may be a tensor or a dict of tensors; `rows_of` adds up what it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from shardkit import Blocks, CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

Kind = Literal[
    "linear", "tied", "embed", "norm", "scale", "stack",  # leaves
    "chain", "add", "twice", "pack", "keyword", "recompute", "reenter",  # what runs its children
    "group", "skip", "drop", "peek", "by_turn", "by_rank", "pick",
]  # fmt: skip
LEAVES: tuple[Kind, ...] = ("linear", "tied", "embed", "norm", "scale", "stack")
WRAPPERS: tuple[Kind, ...] = (
    "chain", "add", "twice", "pack", "keyword", "recompute", "reenter", "group", "skip", "drop", "peek",
    "by_turn", "by_rank", "pick",
)  # fmt: skip
BLOCKS = (Blocks(1, required=False), Blocks(3, required=False), Blocks.elements())
Sync = Literal["none", "shard", "all"]  # what a micro-batch's backward reduces over


@dataclass(frozen=True, repr=False)
class Node:
    """One module of a program; `size` is a leaf's inner size, `unit` makes it a `fully_shard` unit."""

    kind: Kind
    children: tuple[Node, ...] = ()
    size: int = 1
    frozen: bool = False
    unit: bool = False
    reshard: bool | int | None = None

    @property
    def forks(self) -> bool:
        """Whether something in it is read by several branches, or runs several times."""
        return self.kind in ("add", "pack", "by_rank", "pick", "twice") or any(
            child.forks for child in self.children
        )

    def __repr__(self) -> str:
        return _told(self)


@dataclass(frozen=True, repr=False)
class Program:
    """What is trained, on which mesh, under which policies."""

    root: Node
    width: int = 3
    mesh: tuple[int, ...] = (2,)  # (shard,) or (replicate, shard)
    placement: Literal["rows", "columns", "mixed"] | Blocks = "rows"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    micro_batches: tuple[Sync, ...] = ("all",)
    waits: bool = True  # for the reductions of every backward, not only of a step's last
    keeps: bool = False  # gathered parameters after backward
    offloads: bool = False
    fills_unused: bool = False
    flips: bool = False  # what is frozen, in the second step
    input_grad: bool = False
    evaluates: bool = False  # without grad, before and after every micro-batch
    num_buffers: int = 1  # reductions in flight
    fails: tuple[Literal["forward", "backward"], int] | None = None  # first, in the module of this number
    prefetch: tuple[tuple[int, int], ...] = ()  # (unit, the one it gathers ahead)

    @property
    def needs_input_grad(self) -> bool:
        """Ranks that choose may meet nothing trainable; the input then makes all of them run backward."""
        return self.input_grad or any(kind in repr(self.root) for kind in ("by_rank", "pick"))

    @property
    def defers(self) -> bool:
        """Whether a step's last backward, which is sure to run, waits for all reductions."""
        return not self.waits and self.needs_input_grad

    def __repr__(self) -> str:
        return _told(self)


def build(program: Program) -> nn.Module:
    """The unsharded model, its weights the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return _module(program.root, program.width)


def choose(model: nn.Module, rank: int, turn: int) -> None:
    """Tell the modules that choose between their children whose turn it is."""
    for module in model.modules():
        if isinstance(module, Wrapper):
            module.rank, module.turn = rank, turn


def shard(program: Program, model: nn.Module, mesh: DeviceMesh) -> list[FSDPModule]:
    """Make units, bottom-up, the root last; returns them, the root first.

    None is where only some ranks run it forward, or again in backward.
    """

    def wrap(node: Node, module: nn.Module, is_free: bool, is_picked: bool = False) -> None:
        if isinstance(module, Wrapper):
            is_picked |= node.kind == "pick"
            runs_by_rank = node.kind == "by_rank" or (is_picked and node.kind == "reenter")
            for child, below in zip(node.children, module.parts, strict=True):
                wrap(child, below, is_free and not runs_by_rank, is_picked)
            parts = [part for part in module.parts if not isinstance(part, FSDPModule)]
            if node.kind == "group" and is_free and len(parts) > 1:
                _fully_shard(program, list(parts), mesh, node.reshard)
        if node.unit and is_free and not isinstance(module, FSDPModule):
            _fully_shard(program, module, mesh, node.reshard)

    wrap(program.root, model, True)
    if not isinstance(model, FSDPModule):
        _fully_shard(program, model, mesh, program.root.reshard)
    units: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reduce_scatter_unused_params(program.fills_unused, recurse=False)
        unit.set_reshard_after_backward(not program.keeps, recurse=False)
        unit.set_reduce_scatter_max_input_buffers(program.num_buffers, recurse=False)
    for first, second in program.prefetch:
        if max(first, second) < len(units) and first != second:
            units[first].set_modules_to_forward_prefetch([units[second]])
            units[second].set_modules_to_backward_prefetch([units[first]])
    return units


class ProgramFailure(Exception):
    """What a program that fails raises."""


@contextmanager
def failing(program: Program, model: nn.Module) -> Iterator[None]:
    """Let a module fail where the program says, if it runs at all, and catch it."""
    assert program.fails is not None
    when, number = program.fails
    modules = list(model.modules())

    def fail(*_: object) -> None:
        raise ProgramFailure

    def fail_later(_module: nn.Module, _args: object, output: object) -> None:
        if (rows := rows_of(output)).requires_grad:
            rows.register_hook(fail)

    hook = fail if when == "forward" else fail_later
    handle = modules[number % len(modules)].register_forward_hook(hook)
    with suppress(ProgramFailure):
        yield
    handle.remove()


class Linear(nn.Module):
    """Narrow or wide in the middle: (width, size) and back."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, size), nn.Linear(size, width, bias=False)

    def forward(self, value: object) -> Tensor:
        return torch.tanh(self.out(self.into(rows_of(value))))


class Tied(nn.Module):
    """One matrix under two names, used as it is and transposed."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(width, size), nn.Linear(width, size, bias=False)
        self.again.weight = self.into.weight

    def forward(self, value: object) -> Tensor:
        rows = rows_of(value)
        return torch.tanh((self.into(rows) + self.again(rows)) @ self.again.weight)


class Embed(nn.Module):
    """Adds a learned row to each row; some are looked up by no row."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width)

    def forward(self, value: object) -> Tensor:
        rows = rows_of(value)
        return rows + self.table(torch.arange(len(rows)) % max(1, self.table.num_embeddings - 1))


class Norm(nn.Module):
    """LayerNorm, and a parameter that nothing uses."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm, self.unused = nn.LayerNorm(width), nn.Parameter(torch.ones(size))

    def forward(self, value: object) -> Tensor:
        return self.norm(rows_of(value))


class Scale(nn.Module):
    """A parameter of one element and a view of a longer one, held by the module itself."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(size, width))

    def forward(self, value: object) -> Tensor:
        return rows_of(value) * self.scale + self.bias[0]


class Stack(nn.Module):
    """Matrices (size, width, width), applied to all rows and averaged; the output is a view."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, width, width) / width)

    def forward(self, value: object) -> Tensor:
        return torch.einsum("sij,nj->ni", self.weight, rows_of(value)).t().t()


class Wrapper(nn.Module):
    """Runs its children as its kind says."""

    def __init__(self, kind: Kind, parts: list[nn.Module]) -> None:
        super().__init__()
        self.kind, self.parts = kind, nn.ModuleList(parts)
        self.first = parts[0]  # under a second name
        self.rank = self.turn = 0

    def forward(self, value: object) -> object:
        match self.kind:
            case "add":
                return rows_of(value) + sum(rows_of(part(value)) for part in self.parts)
            case "twice":
                return self.first(self.parts[0](value))
            case "skip":
                return value
            case "by_turn":
                return self.parts[self.turn % len(self.parts)](value)
            case "by_rank":
                return rows_of(value) + rows_of(self.parts[self.rank % len(self.parts)](value))
            case "pick":
                outputs = [rows_of(part(value)) for part in self.parts]
                return rows_of(value) + outputs[self.rank % len(outputs)]
            case "drop":
                self._chain(value)
                return value
            case "peek":
                with torch.no_grad():
                    seen = rows_of(self._chain(value))
                return rows_of(value) + seen
            case "recompute":
                return checkpoint(self._chain, value, use_reentrant=False)
            case "reenter":
                rows = rows_of(value)
                return (
                    checkpoint(self._rows_of_chain, rows, use_reentrant=True) if rows.requires_grad else rows
                )
            case "pack":
                rows = rows_of(self._chain(value))
                return {"rows": rows / 2, "more": (rows_of(value), None), "name": "pack"}
            case "keyword":
                return self.first(value=value)
            case _:
                return self._chain(value)

    def _chain(self, value: object) -> object:
        for part in self.parts:
            value = part(value)
        return value

    def _rows_of_chain(self, value: object) -> Tensor:
        return rows_of(self._chain(value))


_LEAF: dict[Kind, Callable[[int, int], nn.Module]] = {
    "linear": Linear, "tied": Tied, "embed": Embed, "norm": Norm, "scale": Scale, "stack": Stack,
}  # fmt: skip


def _module(node: Node, width: int) -> nn.Module:
    made = _LEAF[node.kind](width, node.size) if node.kind in _LEAF else None
    module = made or Wrapper(node.kind, [_module(child, width) for child in node.children])
    return module.requires_grad_(False) if node.frozen else module


def rows_of(value: object) -> Tensor:
    """The sum of all tensors in `value`."""
    if isinstance(value, dict):
        return rows_of(tuple(value.values()))
    if isinstance(value, tuple):
        tensors = [rows_of(item) for item in value if isinstance(item, (Tensor, tuple))]
        return torch.stack(tensors).sum(0)
    assert isinstance(value, Tensor)
    return value


def _fully_shard(
    program: Program, module: nn.Module | list[nn.Module], mesh: DeviceMesh, reshard: bool | int | None
) -> None:
    num_shards = mesh.size(mesh.ndim - 1)

    def place(param: nn.Parameter) -> Shard | Blocks | None:
        if isinstance(program.placement, Blocks):
            return program.placement
        if program.placement == "mixed" and param.ndim < 3:
            return Blocks(2, required=False)
        divides = param.ndim > 1 and param.shape[1] % num_shards == 0
        return Shard(1) if program.placement == "columns" and divides else None

    fully_shard(
        module,
        mesh,
        reshard_after_forward=reshard if reshard is None or num_shards % max(1, reshard) == 0 else True,
        mp_policy=MixedPrecisionPolicy(program.param_dtype, program.reduce_dtype),
        offload_policy=CPUOffloadPolicy(pin_memory=False) if program.offloads else None,
        shard_placement_fn=place,
    )


def _told(value: Node | Program) -> str:
    """The expression that makes it, defaults left out."""
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
    words = [
        f"{f.name}={held!r}" for f, held in fields if f.default is dataclasses.MISSING or held != f.default
    ]
    return f"{type(value).__name__}({', '.join(words)})"


def _nodes() -> st.SearchStrategy[Node]:
    traits = {
        "frozen": st.sampled_from((False, False, False, True)),
        "unit": st.sampled_from((True, False)),
        "reshard": st.sampled_from((None, True, False, 2)),
    }
    leaves = st.builds(Node, st.sampled_from(LEAVES), size=st.sampled_from((1, 2, 3, 5, 7)), **traits)

    def wrap(children: st.SearchStrategy[Node], min_size: int = 1) -> st.SearchStrategy[Node]:
        lists = st.lists(children, min_size=min_size, max_size=3).map(tuple)
        return st.builds(Node, st.sampled_from(WRAPPERS), lists, **traits)

    return wrap(st.recursive(leaves, wrap, max_leaves=6), min_size=2)


def _programs_on(mesh: tuple[int, ...]) -> st.SearchStrategy[Program]:
    syncs: tuple[Sync, ...] = ("none", "all") if len(mesh) == 1 else ("none", "shard", "all")
    earlier = st.lists(st.sampled_from(syncs), max_size=2)
    rare = st.sampled_from((False, False, False, True))
    return st.builds(
        Program,
        root=_nodes(),
        width=st.sampled_from((3, 1, 2, 5, 6)),
        mesh=st.just(mesh),
        placement=st.sampled_from(("rows", "columns", "mixed", *BLOCKS)),
        param_dtype=st.sampled_from((None, None, torch.bfloat16)),
        reduce_dtype=st.sampled_from((None, None, torch.float32, torch.bfloat16)),
        micro_batches=earlier.map(lambda before: (*before, "all")),
        waits=st.sampled_from((True, True, False)),
        keeps=rare,
        offloads=rare,
        fills_unused=st.booleans(),
        flips=st.booleans(),
        input_grad=st.booleans(),
        evaluates=st.booleans(),
        num_buffers=st.sampled_from((1, 1, 3)),
        fails=st.none() | st.tuples(st.sampled_from(("forward", "backward")), st.integers(0, 9)),
        prefetch=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=2).map(tuple),
    )


def draw(world_size: int) -> st.SearchStrategy[Program]:
    """Programs for `world_size` ranks, on every mesh of that many."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    meshes = [(world_size,), *((n, world_size // n) for n in divisors)]
    return st.sampled_from(meshes).flatmap(_programs_on)
