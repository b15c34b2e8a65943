"""One suite, both layouts: a module or a test that uses `both_layouts` also runs with ragged shards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardkit
from shardkit import Blocks


def ragged_fully_shard(
    module: nn.Module | Sequence[nn.Module], mesh: DeviceMesh | None = None, **options: object
) -> object:
    """`fully_shard`, with `Blocks()` where nothing is said about the placement."""
    if options.get("shard_placement_fn") is None:
        options["shard_placement_fn"] = lambda param: Blocks()
    return shardkit.fully_shard(module, mesh, **options)


ragged_fully_shard.state = shardkit.fully_shard.state


@pytest.fixture(params=["rows", "ragged"])
def both_layouts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test module's `fully_shard` place parameters as `Shard(0)`, then as `Blocks()`."""
    if request.param == "ragged":
        monkeypatch.setattr(request.module, "fully_shard", ragged_fully_shard)
