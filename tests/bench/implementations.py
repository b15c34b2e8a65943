"""What is compared: each row of a table is one way to run the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardkit import Blocks, fully_shard
from tests.bench.table import Samples

# (model, submodules that are units of their own, mesh, reshard_after_forward) -> what to call in its place
Wrap = Callable[[nn.Module, Sequence[nn.Module], DeviceMesh, bool | None], nn.Module]


def bare(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, reshard: bool | None) -> nn.Module:
    """No parallelism: what compute alone costs."""
    return model


def ddp(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, reshard: bool | None) -> nn.Module:
    """torch's DistributedDataParallel over the default group."""
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, reshard: bool | None) -> nn.Module:
    """torch's fully_shard."""
    for module in (*units, model):
        fsdp.fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return model


def sharded(
    model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, reshard: bool | None
) -> nn.Module:
    """shardkit with Shard(0), as FSDP2."""
    for module in (*units, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return model


def ragged(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, reshard: bool | None) -> nn.Module:
    """shardkit with ragged shards of whole rows."""
    for module in (*units, model):
        fully_shard(
            module, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=lambda param: Blocks()
        )
    return model


WRAPS: Mapping[str, Wrap] = {
    "bare": bare,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "shardkit": sharded,
    "shardkit-ragged": ragged,
}
SHARDED = ("fsdp2", "shardkit", "shardkit-ragged")


def interleave(
    names: Sequence[str], num_launches: int, launch: Callable[[str], Mapping[str, float]]
) -> Samples:
    """Launch every implementation once a round, each round starting with another one.

    Args:
        launch: runs one implementation in fresh processes and gives its quantities.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for i in range(num_launches):
        first = i % len(names)
        for name in (*names[first:], *names[:first]):
            for quantity, value in launch(name).items():
                samples[name].setdefault(quantity, []).append(value)
    return samples
