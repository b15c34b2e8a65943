"""Random fills of sharded parameters on the CPU, where torch has none that differ from shard to shard.

Level 1 of the data flow. `nn.init.normal_(param)` on a DTensor asks a tracker for the state of the generator.
torch's own serves accelerators only, and without one all ranks fill their shards with the same numbers.

    seed = a draw from the generator, the same on all ranks          rank 0, 1 of 2: shards 0, 1
    shard i is filled from  seed + i * golden ratio                  copies of a shard get the same numbers
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from shardkit._torch import DTensorSpec, OffsetBasedRNGTracker, fill_shards_with


def serve_cpu_shards(mesh: DeviceMesh) -> None:
    """Let every shard on the CPU draw numbers of its own, unless DTensor has a tracker already."""
    fill_shards_with(lambda: ShardRandom(mesh))


class ShardRandom(OffsetBasedRNGTracker):
    """Where DTensor asks for random numbers; on an accelerator torch's own answer.

    As there, all ranks must have the same generator state; it moves on by one draw for each fill.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.device_type == "cpu":
            self._device = torch.device("cpu")
            self._use_distribute_region = True
        else:
            super().__init__(mesh, run_state_sync=False)

    @contextmanager
    def _distribute_region(
        self, spec: DTensorSpec, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        on_device = (
            nullcontext() if self._device.type == "cpu" else super()._distribute_region(spec, generator)
        )
        source = (
            generator if generator is not None and generator.device.type == "cpu" else torch.default_generator
        )
        seed = int(torch.randint(2**62, (), generator=source))
        state = torch.default_generator.get_state()
        with on_device:
            torch.default_generator.manual_seed((seed + 0x9E3779B97F4A7C15 * shard_index(spec)) % 2**63)
            try:
                yield
            finally:
                torch.default_generator.set_state(state)


def shard_index(spec: DTensorSpec) -> int:
    """The number of this rank's shard; ranks that hold copies of one shard have the same."""
    index = 0
    for dim, (placement, coordinate) in enumerate(
        zip(spec.placements, spec.mesh.get_coordinate() or (), strict=False)
    ):
        if not isinstance(placement, (Replicate, Partial)):
            index = index * spec.mesh.size(dim) + coordinate
    return index
