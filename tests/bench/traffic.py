"""Collectives and bytes of a training step on 4 gloo ranks, against theory.

For M bytes of parameters on W ranks, a gather or a scatter of everything makes each rank send M(W-1)/W, DDP's
all-reduce twice that. With reshard a step gathers twice and scatters once, 1.5 times DDP's volume; without,
once and once, DDP's volume. Bytes are counted at torch's dispatcher: messages as they are, collectives by
what an ideal transport sends (gloo's own reduce-scatter is a whole all-reduce and sends twice as much).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit.collectives import count_traffic
from tests.bench.implementations import SHARDED, WRAPS
from tests.bench.table import Bar, Row, Samples, compare
from tests.support.ranks import run_ranks

TITLE = "Collectives a unit and MiB sent a rank, in one step of 4 gloo ranks"
WORLD_SIZE, NUM_UNITS, DIM = 4, 6, 256
COUNTS = ("all-gathers", "reduce-scatters")
VOLUME = "sent"
BARS = tuple(
    bar
    for name in ("shardkit", "shardkit-ragged")
    for bar in (
        *(Bar(name, count, 1.0, of="theory", at_least=1.0) for count in COUNTS),
        Bar(name, VOLUME, 1.01, of="theory", at_least=1.0),  # 1 %: flags and alignment at a bucket's end
    )
)


def measure(num_launches: int) -> Mapping[bool, Samples]:
    """Reshard after forward or not -> samples. Counts do not vary, so one launch is enough."""
    names = ("ddp", *SHARDED)
    return {
        reshard: {name: listed(run_ranks(count_step, WORLD_SIZE, name, reshard)[0]) for name in names}
        for reshard in (True, False)
    }


def rows(samples: Mapping[bool, Samples]) -> list[Row]:
    table = []
    for reshard, of_names in samples.items():
        of_all = {**of_names, "theory": listed(theory(reshard))}
        counts = {name: {c: values[c] for c in COUNTS if c in values} for name, values in of_all.items()}
        volumes = {name: {VOLUME: values[VOLUME]} for name, values in of_all.items()}
        case = "reshard after forward" if reshard else "no reshard after forward"
        table += compare(case, counts, "a unit", BARS)
        table += compare(case, volumes, "MiB", BARS)
    return table


def theory(reshard: bool) -> dict[str, float]:
    param_bytes = sum(param.nbytes for param in build_model().parameters())
    num_gathers = 2 if reshard else 1
    sent_mebibytes = (num_gathers + 1) * param_bytes * (WORLD_SIZE - 1) / WORLD_SIZE / 2**20
    return {"all-gathers": num_gathers, "reduce-scatters": 1, VOLUME: sent_mebibytes}


def listed(quantities: Mapping[str, float]) -> dict[str, list[float]]:
    return {quantity: [value] for quantity, value in quantities.items()}


def build_model() -> nn.Sequential:
    """Every row count divides by the ranks, so that no shard is padded."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)) for _ in range(NUM_UNITS))
    )


def count_step(rank: int, world_size: int, name: str, reshard: bool) -> dict[str, float]:
    """What this rank does in the third step: the first two may agree on a plan or build buckets."""
    model = build_model()
    wrapped = WRAPS[name](model, list(model), init_device_mesh("cpu", (world_size,)), reshard)
    x = torch.ones(1, DIM)
    for _ in range(2):
        wrapped(x).sum().backward()
    with ExitStack() as stack:
        wire = stack.enter_context(Wire())
        num_calls = shardkit_calls(stack) if name.startswith("shardkit") else wire.num_calls
        wrapped(x).sum().backward()
    counts = {
        count: num_calls[count.replace("-", "_").removesuffix("s")] / NUM_UNITS
        for count in COUNTS
        if name != "ddp"
    }
    return {**counts, VOLUME: wire.sent_bytes / 2**20}


def shardkit_calls(stack: ExitStack) -> Counter[str]:
    """shardkit's own count: between CPUs one of its collectives is many messages."""
    return stack.enter_context(count_traffic()).num_calls


class Wire(TorchDispatchMode):
    """Counts the collectives of this rank, over groups of WORLD_SIZE, and the bytes it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls: Counter[str] = Counter()
        self.sent_bytes = 0.0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in SENT_BYTES:
            kind, sent_bytes = SENT_BYTES[name]
            self.num_calls[kind] += 1
            self.sent_bytes += sent_bytes(args)
        return func(*args, **(kwargs or {}))


def nbytes(argument: object) -> int:
    """The bytes of a tensor or a list of them."""
    return argument.nbytes if isinstance(argument, Tensor) else sum(map(nbytes, argument))


# operator of c10d -> (kind, the bytes it makes one rank send, from its arguments)
SENT_BYTES: Mapping[str, tuple[str, Callable[[tuple[object, ...]], float]]] = {
    "_allgather_base_": ("all_gather", lambda args: (WORLD_SIZE - 1) * nbytes(args[1])),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: (WORLD_SIZE - 1) * nbytes(args[0])),
    "allreduce_": ("all_reduce", lambda args: 2 * (WORLD_SIZE - 1) / WORLD_SIZE * nbytes(args[0])),
    "alltoall_base_": ("all_to_all", lambda args: (WORLD_SIZE - 1) / WORLD_SIZE * nbytes(args[1])),
    "send": ("send", lambda args: nbytes(args[0])),
    "broadcast_": ("broadcast", lambda args: nbytes(args[0])),
}
