"""Streams and events of a device, and their twin on the CPU, where everything is already in order.

Level 5 of the data flow. The rest of the runtime is written once, as for CUDA: an operation is put on a
stream, an event marks how far it got, another stream waits for it. On the CPU an event is passed when it is
recorded and nothing is ever waited for; collectives there are waited for by their works
(`collectives.Pending`).

[Note: freeing gathered parameters]
The gathered bytes are allocated on the all-gather stream, so freeing them hands them back to that stream,
which may fill them again at once, while the compute stream still reads them. `record_stream` would keep them
for a time that nobody can predict. Instead a reshard records an event on the compute stream and the bytes are
freed when a later gather has made the all-gather stream wait for it. The latest reshard is left pending, so
that the next gather overlaps with the computation that it marks: two units of memory, always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType

import torch

from shardkit.buffer import FlatBuffer

_NOTHING = nullcontext()


class Streams:
    """The streams of one tree of units, shared by all of them."""

    def __init__(self, device: torch.device) -> None:
        self._module = device_module(device)
        self.runs_ahead = self._module is not None
        self.all_gather = self._new()
        self.reduce_scatter = self._new()
        self.all_reduce = self._new()
        self._retired: deque[tuple[torch.Event, FlatBuffer]] = deque()

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Run what is inside on `stream`."""
        return _NOTHING if self._module is None or stream is None else self._module.stream(stream)

    def after(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Run what is inside on `stream`, after all that the current stream was given."""
        return _NOTHING if self._module is None else self._after(stream)

    @contextmanager
    def _after(self, stream: torch.Stream | None) -> Iterator[None]:
        event = self.mark()
        with self.on(stream):
            self.wait(event)
            yield

    def mark(self) -> torch.Event | None:
        """An event on the current stream."""
        return None if self._module is None else self._module.current_stream().record_event()

    def wait(self, event: torch.Event | None) -> None:
        """The current stream waits for `event`."""
        if event is not None and self._module is not None:
            self._module.current_stream().wait_event(event)

    def gather_after(self, event: torch.Event | None = None) -> None:
        """Later gathers wait for `event`, or for all that the current stream was given (a step)."""
        if self._module is not None and self.all_gather is not None:
            self.all_gather.wait_event(event or self._module.current_stream().record_event())

    def free_later(self, buffer: FlatBuffer) -> None:
        """Free gathered bytes once computation is done with them. See [Note: freeing gathered parameters]."""
        event = self.mark()
        if event is None:
            buffer.free()
        else:
            self._retired.append((event, buffer))
            self.reclaim(keep=1)

    def is_retired(self, buffer: FlatBuffer) -> bool:
        """Whether the bytes are on their way out."""
        return any(retired is buffer for _, retired in self._retired)

    def reclaim(self, *, keep: int) -> None:
        """Free what was retired, but for the `keep` latest."""
        while len(self._retired) > keep:
            event, buffer = self._retired.popleft()
            if self.all_gather is not None:
                self.all_gather.wait_event(event)
            with self.on(self.all_gather):
                buffer.free()

    def _new(self) -> torch.Stream | None:
        return None if self._module is None else self._module.Stream(priority=-1)


def device_module(device: torch.device) -> ModuleType | None:
    """torch's module of the device's streams, such as torch.cuda; None where all is done in order."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)
