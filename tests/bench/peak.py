"""Peak of live tensor bytes in a training step with 1, 2 and 4 ranks to a shard, on 4 gloo ranks.

Live are the storages that some operator has touched and that still exist, at their present size: parameters,
gradients, gathered units, buffers in transit; bytes that several of them share count once. They are added up
after every operator, so what lives only inside one is not seen. Activations are kept out by a batch of one
row, which makes them less than 1 % of the weights; SGD has no state.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardkit.report import predicted_peak_bytes
from tests.bench.implementations import SHARDED, WRAPS
from tests.bench.table import Bar, Row, Samples, compare
from tests.support.ranks import run_ranks

TITLE = "Peak of live bytes in a step, 4 gloo ranks, batch of one row"
WORLD_SIZE, NUM_UNITS, DIM = 4, 6, 256
NUM_STEPS = 3
QUANTITY = "peak"
BARS = (
    Bar("shardkit", QUANTITY, 1.00),
    Bar("shardkit", QUANTITY, 1.05, of="predicted", at_least=0.95),
    Bar("shardkit-ragged", QUANTITY, 1.00),
    Bar("shardkit-ragged", QUANTITY, 1.05, of="predicted-ragged", at_least=0.95),
)


def measure(num_launches: int) -> Mapping[int, Samples]:
    """Ranks to a shard -> samples, in MiB: bytes do not vary, so one launch is enough."""
    return {
        shard_size: {
            name: {QUANTITY: [nbytes / 2**20]}
            for implementation in SHARDED
            for name, nbytes in highest_of_ranks(implementation, shard_size).items()
        }
        for shard_size in (1, 2, 4)
    }


def rows(samples: Mapping[int, Samples]) -> list[Row]:
    return [
        row
        for shard_size, of_size in samples.items()
        for row in compare(f"F = {shard_size}", of_size, "MiB", BARS)
    ]


def highest_of_ranks(implementation: str, shard_size: int) -> dict[str, int]:
    of_ranks = run_ranks(peak_bytes, WORLD_SIZE, implementation, shard_size)
    return {name: max(peaks[name] for peaks in of_ranks) for name in of_ranks[0]}


def peak_bytes(rank: int, world_size: int, implementation: str, shard_size: int) -> dict[str, int]:
    """The peak within the last step, of which the earlier ones left nothing behind but the shards.

    What shardkit predicts for the model joins the result as a row of its own.
    """
    units = [nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)) for _ in range(NUM_UNITS)]
    mesh = init_device_mesh(
        "cpu", (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard")
    )
    model = WRAPS[implementation](nn.Sequential(*units), units, mesh, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    x = torch.ones(1, DIM)
    with LiveBytes() as live:
        for _ in range(NUM_STEPS):
            live.peak_bytes = 0
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    peaks = {implementation: live.peak_bytes}
    if implementation.startswith("shardkit"):
        peaks[implementation.replace("shardkit", "predicted")] = predicted_peak_bytes(model)
    return peaks


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operator that first shows it until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it calls again with its local tensors
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes())
        return result

    def _live_bytes(self) -> int:
        live = {key: storage for key, ref in self._storages.items() if (storage := ref()) is not None}
        self._storages = {key: self._storages[key] for key in live}
        real = [storage for storage in live.values() if storage.device.type != "meta"]
        total = end = 0
        for start, nbytes in sorted((storage.data_ptr(), storage.nbytes()) for storage in real):
            total += max(0, start + nbytes - max(start, end))
            end = max(end, start + nbytes)
        return total
