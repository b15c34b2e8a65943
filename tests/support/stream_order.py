"""A device of streams, simulated: the CPU does the arithmetic at once, and checked is whether it was ordered.

Every stream counts what it was given and knows how far each other stream was when it last waited for it (a
vector clock). An event is a copy of that knowledge; to wait for one is to take it over. One operation happens
before another where the stream of the latter knew of it when it was given that:

    compute      write w            record e                        a = write w, b = read w
                 compute: 1         e = {compute: 1}
    all_gather                                 wait e               read w
                                               knows compute: 1     1 <= 1: ordered; without the wait: a race

Checked, by range of bytes: a write happens after all earlier reads and writes of the same bytes, a read after
the last writes. Memory is the caching allocator's: it belongs to the stream that was current when it was
allocated and goes back to that stream's pool at once when its storage is resized to zero or dies. Whatever
that stream allocates later may be these bytes, so the uses of the former owner count as uses of the new one.

The host is ahead of all streams. Where it synchronises with an event, what it does later comes after that.
Where it reads a number it would have to wait too, but that orders nothing here: nobody may rely on it, and
numbers that are on the CPU anyway, as an optimizer's step, look the same. Process groups: `stream_group.py`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardkit.streams

Clock = dict[str, int]
BY_GROUPS = ("c10d::", "_c10d_functional::")
READS_NOTHING = ("aten::empty", "aten::new_empty", "aten::set_", "aten::record_stream")


def join(clock: Clock, other: Mapping[str, int]) -> None:
    """Let `clock` know what `other` knows."""
    for name, time in other.items():
        clock[name] = max(time, clock.get(name, 0))


class Event:
    """How far everything was that its stream knew of."""

    def __init__(self, device: Device, clock: Clock) -> None:
        self._device, self.clock = device, clock

    def synchronize(self) -> None:
        """The host waits for it."""
        join(self._device.host, self.clock)


class Stream:
    """Runs what it is given in order; of other streams it knows what it waited for."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self.name = device, name
        self.clock: Clock = {name: 0}

    @property
    def now(self) -> int:
        """The number of the latest operation."""
        return self.clock[self.name]

    def advance(self) -> None:
        """Take one operation from the host."""
        join(self.clock, self._device.host)
        self.clock[self.name] += 1

    def record_event(self) -> Event:
        """Mark what was given so far."""
        return Event(self._device, dict(self.clock))

    def wait_event(self, event: Event) -> None:
        """What is given from now on comes after `event`."""
        join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        """What is given from now on comes after all that `other` was given."""
        join(self.clock, other.clock)


class Device:
    """What `torch.cuda` is to the runtime: the current stream, and new ones."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.streams, self.groups = [Stream(self, "compute")], list[Stream]()
        self._current = [self.streams[0]]

    def current_stream(self) -> Stream:
        """Where operations go now."""
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Put what is inside on `stream`."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def Stream(self, priority: int = 0) -> Stream:
        """A new stream; `Streams` makes three at a time."""
        names = ("all_gather", "reduce_scatter", "all_reduce")
        tree, which = divmod(len(self.streams) - 1, len(names))
        made = Stream(self, f"{names[which]} {tree}")
        self.streams.append(made)
        return made


class Access(NamedTuple):
    """A read or write of the bytes from `start` to `stop`."""

    start: int
    stop: int
    stream: str
    time: int
    is_write: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} on {self.stream}"


@dataclass(slots=True, eq=False)
class Block:
    """Allocated bytes, the stream that they belong to, and the accesses that may still matter."""

    start: int
    stop: int
    stream: Stream
    made: str
    accesses: list[Access] = field(default_factory=list)
    owner: weakref.ref[torch.UntypedStorage] | None = None


class Simulation(TorchDispatchMode):
    """Notes every operation inside its `with`; `races` says what was not ordered."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.races: dict[str, None] = {}  # messages, each once
        self.num_accesses = 0
        self.unwaited: set[object] = set()  # works of process groups, with their tensors
        self._blocks: dict[int, Block] = {}
        self._pools: dict[
            str, dict[str, Access]
        ] = {}  # of each stream: the latest use of freed bytes by each
        self._is_quiet = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it will come back with plain tensors
        result = func(*args, **(kwargs or {}))
        if not self._is_quiet and not any(issubclass(kind, FakeTensor) for kind in types):
            self._note_op(func, args, kwargs or {}, result)
        return result

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Note nothing."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def note(self, what: str, stream: Stream, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """An operation on `stream`."""
        stream.advance()
        where = f"{what} ({_line()})"
        for is_write, tensors in ((False, reads), (True, writes)):
            does = f"{'write' if is_write else 'read'} by {where}"
            for tensor in tensors:
                if tensor.numel():
                    start, stop = _range(tensor)
                    access = Access(start, stop, stream.name, stream.now, is_write, does)
                    self._check(access, stream, self._block_of(tensor.untyped_storage(), where))

    def resize(self, storage: torch.UntypedStorage, resize: Callable[..., object], nbytes: int) -> None:
        """The bytes of a storage come or go."""
        if storage.device.type == "cpu" and (block := self._blocks.get(storage.data_ptr())) is not None:
            self._free(block)
        resize(storage, nbytes)
        if storage.device.type == "cpu" and nbytes:
            self._block_of(storage, _line())

    def _note_op(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, schema = func._schema.name, func._schema
        aliases = [out.alias_info for out in schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return  # a view
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_write else reads).extend(_tensors(value))
        made = _tensors(result)
        if name.startswith(BY_GROUPS):
            return  # which note by themselves
        if name.startswith(READS_NOTHING):
            for tensor in made:
                if tensor.numel():
                    self._block_of(tensor.untyped_storage(), f"{name} ({_line()})")
            return
        seen = {id(tensor) for tensor in writes}
        new = [tensor for tensor in made if id(tensor) not in seen]
        self.note(name, self.device.current_stream(), reads, writes + new)

    def _check(self, access: Access, stream: Stream, block: Block) -> None:
        self.num_accesses += 1
        kept = []
        for old in block.accesses:
            overlaps = old.start < access.stop and access.start < old.stop
            if not overlaps or (not old.is_write and not access.is_write):
                is_older = old.stream == access.stream and not old.is_write and overlaps
                if not (is_older and access.start <= old.start and old.stop <= access.stop):
                    kept.append(old)
                continue
            if stream.clock.get(old.stream, 0) < old.time:
                size = f"{block.stop - block.start} bytes made at {block.made}"
                self.races[f"{access} does not wait for {old}: {size}"] = None
            if not (access.is_write and access.start <= old.start and old.stop <= access.stop):
                kept.append(old)
        block.accesses = [*kept, access]

    def _block_of(self, storage: torch.UntypedStorage, made: str) -> Block:
        """The block in which a storage lies, as its owner or an alias from elsewhere; new at first sight."""
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        blocks = list(self._blocks.values())  # at once: other threads drop storages at any time
        for block in [b for b in blocks if b.start < stop and start < b.stop]:
            owner = None if block.owner is None else block.owner()
            is_there = owner is not None and owner.data_ptr() == block.start
            if is_there and block.start <= start and stop <= block.stop:
                return block
            self._free(block)  # it was replaced where nobody could see
        stream = self.device.current_stream()
        pool = list(self._pools.get(stream.name, {}).values())
        unknown = [old for old in pool if stream.clock.get(old.stream, 0) < old.time]
        block = Block(start, stop, stream, made)
        earlier = Access(start, stop, stream.name, stream.now, True, f"what was given before {made}")
        block.accesses = [old._replace(start=start, stop=stop) for old in unknown] + [earlier]
        block.owner = weakref.ref(storage, lambda _: self._free(block))
        self._blocks[start] = block
        return block

    def _free(self, block: Block) -> None:
        """Back into the pool of the stream that it was allocated on."""
        if self._blocks.get(block.start) is block:
            del self._blocks[block.start]
            pool = self._pools.setdefault(block.stream.name, {})
            for old in block.accesses:
                if old.stream not in pool or pool[old.stream].time < old.time:
                    pool[old.stream] = old._replace(is_write=True, what=f"{old.what} in bytes since freed")


@contextmanager
def simulated_streams() -> Iterator[Simulation]:
    """Let shardkit put its work on simulated streams inside the `with`, where units are to be made too."""
    simulation = Simulation()
    resize, tolist = torch.UntypedStorage.resize_, Tensor.tolist

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> None:
        simulation.resize(storage, resize, nbytes)

    def read(tensor: Tensor) -> Any:
        simulation.note("tolist", simulation.device.current_stream(), [tensor], [])
        return tolist(tensor)

    with ExitStack() as stack:
        stack.enter_context(patch.object(shardkit.streams, "device_module", lambda _: simulation.device))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        stack.enter_context(patch.object(Tensor, "tolist", read))
        stack.enter_context(simulation)
        yield simulation


def _tensors(value: Any) -> list[Tensor]:
    """Those with bytes that may be looked at."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and _is_real(leaf)]


def _is_real(tensor: Tensor) -> bool:
    is_fake = isinstance(tensor, FakeTensor)
    return not is_fake and tensor.device.type == "cpu" and tensor.layout == torch.strided


def _range(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first to the last element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def _line() -> str:
    """The innermost line of shardkit on the stack, else that of the test."""
    frame, found = sys._getframe(1), "elsewhere"
    while frame is not None:
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if module.startswith("shardkit"):
            return f"{path.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        if found == "elsewhere" and "/tests/" in path and "/stream_" not in path:
            found = f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found
