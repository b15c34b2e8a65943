"""Process groups on simulated streams: gloo carries the bytes, the order is that of NCCL's groups.

As ProcessGroupNCCL in torch 2.8 and later, when no environment variable says otherwise:

    asyncOp       the operation is put on a stream of the group, which first waits for the current stream. The
                  work holds its tensors until `wait`, which lets the current stream, not the host, wait
    else          it is put on the current stream, and there is no work

The host comes back at once in both. All of a group's asynchronous operations share one stream. NCCL opens a
group when it is first used, which takes all its ranks: messages may only follow a collective. One that is
bound to its device was opened when it was made.
"""

# mypy: disable-error-code="override, assignment, attr-defined"
# torch's stubs give groups overloads that a group in Python need not have, and gloo's no methods
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from tests.support.stream_order import Event, Simulation, Stream

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def init_simulated_group(simulation: Simulation) -> None:
    """Replace the default group of gloo by one of simulated NCCL, as will be those made from it."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # who leaves a group of gloo breaks the connections that others still make
    dist.destroy_process_group()

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        return SimulatedGroup(simulation, dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("simulated", make, devices=["cpu"])
    store = dist.PrefixStore("simulated", store)
    dist.init_process_group("simulated", store=store, rank=rank, world_size=size)


class SimulatedWork(dist.Work):
    """An operation under way, which holds its tensors until somebody waits for it."""

    def __init__(
        self,
        simulation: Simulation,
        event: Event,
        tensors: Sequence[Tensor],
        finish: Callable[[], None],
    ) -> None:
        super().__init__()
        self._simulation, self._event, self._tensors, self._finish = simulation, event, tensors, finish
        simulation.unwaited.add(self)

    def wait(self, timeout: object = None) -> bool:
        """The current stream waits."""
        self.finish()
        self._simulation.device.current_stream().wait_event(self._event)
        return True

    def finish(self) -> bool:
        """The bytes are there, of which no stream knows; the tensors are let go."""
        if self in self._simulation.unwaited:
            with self._simulation.quiet():
                self._finish()
            self._tensors, self._finish = (), lambda: None
            self._simulation.unwaited.remove(self)
        return True


class SimulatedGroup(dist.ProcessGroup):
    """A group that calls itself nccl, over one of gloo."""

    supports_coalescing = False

    def __init__(self, simulation: Simulation, inner: dist.ProcessGroupGloo) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._simulation, self._inner, self.options = simulation, inner, inner.options
        self._stream = Stream(simulation.device, f"nccl {len(simulation.device.groups)}")
        simulation.device.groups.append(self._stream)
        self._is_open = False

    @property
    def group_name(self) -> str:
        """As c10d knows it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def name(self) -> str:
        """The backend's."""
        return "nccl"

    getBackendName = name

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        return self

    def all_gather_single(self, output: Tensor, row: Tensor, opts: Any = None) -> dist.Work:
        """One row a rank."""
        with self._simulation.quiet():
            rows = list(output.view(self.size(), -1).unbind()) if output.numel() else []

        def start() -> list[dist.Work]:
            return [self._inner.allgather([rows], [row.view(-1)])] if rows else []

        return self._run("all_gather", _is_async(opts), [row], [output], start)

    def allgather(self, outputs: list[list[Tensor]], rows: list[Tensor], opts: Any = None) -> dist.Work:
        """The same, into tensors of their own."""

        def start() -> list[dist.Work]:
            return [self._inner.allgather(outputs, rows)]

        return self._run("all_gather", _is_async(opts), rows, outputs[0], start)

    def reduce_scatter_single(self, output: Tensor, rows: Tensor, opts: Any = None) -> dist.Work:
        """Sum or average rows, one a rank, in the order of shardkit's own: r, r - 1, r - 2, .."""
        with self._simulation.quiet():
            of_ranks = [torch.empty_like(rows) for _ in range(self.size())]

        def start() -> list[dist.Work]:
            return [self._inner.allgather([of_ranks], [rows])]

        def finish() -> None:
            own = [of_rank.view(self.size(), -1)[self.rank()] for of_rank in of_ranks]
            own = [own[(self.rank() - step) % self.size()] for step in range(self.size())]
            output.copy_(functools.reduce(torch.add, own).view(output.shape))
            self._average([output], opts)

        return self._run("reduce_scatter", _is_async(opts), [rows], [output], start, finish)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce in place."""

        def start() -> list[dist.Work]:
            return [self._inner.allreduce(tensors, _sum(opts))]

        return self._run(
            "all_reduce", _is_async(opts), [], tensors, start, lambda: self._average(tensors, opts)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Send in place."""
        is_root = opts.rootRank == self.rank()
        reads, writes = (tensors, []) if is_root else ([], tensors)
        return self._run(
            "broadcast", _is_async(opts), reads, writes, lambda: [self._inner.broadcast(tensors, opts)]
        )

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> dist.Work:
        """To one rank, in the order of calls: NCCL has no tags."""
        return self._run("send", True, tensors, [], lambda: [self._inner.send(tensors, target, 0)])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """From one rank, in the order of calls."""
        return self._run("recv", True, [], tensors, lambda: [self._inner.recv(tensors, source, 0)])

    def barrier(self, opts: Any = None) -> dist.Work:
        """The host waits for the ranks."""
        return self.allreduce([torch.zeros(1)])

    # what the functional collectives call, always with one tensor
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], rows: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """As `all_gather_single`."""
        return self.all_gather_single(outputs[0], rows[0], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], rows: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """As `reduce_scatter_single`."""
        return self.reduce_scatter_single(outputs[0], rows[0], opts)

    allreduce_coalesced = allreduce

    # names before torch 2.13
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _run(
        self,
        kind: str,
        is_async: bool,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        start: Callable[[], list[dist.Work]],
        finish: Callable[[], None] = lambda: None,
    ) -> dist.Work:
        simulation = self._simulation
        if kind not in ("send", "recv"):
            self._is_open = True
        elif not self._is_open and self.bound_device_id is None:
            simulation.races[f"{kind} is the first of its group, {self._stream.name}"] = None
        stream = simulation.device.current_stream()
        if is_async:
            self._stream.wait_stream(stream)
            stream = self._stream
        simulation.note(kind, stream, reads, writes)
        with simulation.quiet():
            works = start()

        def finish_all() -> None:
            for work in works:
                work.wait()
            finish()

        work = SimulatedWork(simulation, stream.record_event(), (*reads, *writes), finish_all)
        if is_async:
            return work
        work.finish()
        return None  # type: ignore[return-value]  # as NCCL's

    def _average(self, tensors: Sequence[Tensor], opts: Any) -> None:
        if opts is not None and opts.reduceOp == AVG:
            for tensor in tensors:
                tensor.div_(self.size())


def _is_async(opts: Any) -> bool:
    return True if opts is None else bool(opts.asyncOp)


def _sum(opts: Any) -> Any:
    """What gloo, which has no mean, is to do."""
    own = dist.AllreduceOptions()
    own.reduceOp = SUM if opts is None or opts.reduceOp == AVG else opts.reduceOp
    return own
