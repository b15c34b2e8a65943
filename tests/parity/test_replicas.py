"""Replicas that share the work of an optimizer step: every rank's bits are those of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit import Blocks, fully_shard
from shardkit.boxes import Layout, local_part
from shardkit.collectives import count_traffic
from shardkit.optim import Muon
from shardkit.placement import RaggedShard
from tests.parity.test_muon import Net, elements_of, give_grads, matrices, rows_of, sharded
from tests.support.ranks import run_ranks

SHAPES = [(48, 32), (24, 80), (32, 40), (3, 16, 24), (64, 64)]


class Grid(NamedTuple):
    """A mesh, and where each parameter lies on it."""

    mesh_shape: tuple[int, ...]
    placements: Sequence[Sequence[Placement]]


def on_shards(num_shards: int) -> list[Placement]:
    """One axis: ragged rows with empty shards, columns, cuts inside rows, a cut stack, all of it."""
    stack = RaggedShard((0, 1), rows_of(48, num_shards).local_units)
    return [rows_of(48, num_shards), Shard(1), elements_of(32 * 40, num_shards), stack, Replicate()]


R = Replicate()
GRIDS: Mapping[str, Grid] = {
    "2 replicas of 2": Grid((2, 2), [(R, p) for p in on_shards(2)]),
    "2 replicas of 3": Grid((2, 3), [(R, p) for p in on_shards(3)]),
    "shards of 2 replicas": Grid((2, 2), [(p, R) for p in on_shards(2)]),
    "4 copies": Grid((4,), [(R,)] * 5),
    "tensor parallel copies": Grid((2, 2), [(rows_of(48, 2), R), (Shard(0), Shard(1)), *[(Shard(0), R)] * 3]),
}
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "owners": {"placement": "owner", "bucket_bytes": 4000},
    "normuon": {"row_norm_beta2": 0.95},
    "float32": {"ns_dtype": torch.float32, "placement": "replicate"},
}


def step_twice(params: Sequence[nn.Parameter], **settings: object) -> Muon:
    optimizer = Muon(params, lr=0.02, **settings)
    for step in (1, 2):
        give_grads(params, matrices(step, SHAPES))
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", GRIDS)
def test_shared_work_leaves_every_rank_with_the_bits_of_one_process(kind: str) -> None:
    grid = GRIDS[kind]
    expected = {}
    for name, settings in SETTINGS.items():
        whole = [nn.Parameter(v) for v in matrices(0, SHAPES)]
        states = step_twice(whole, **settings).state
        expected[name] = [{"param": p.detach(), **states[p]} for p in whole]

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", grid.mesh_shape)
        for replicas in ("shared", "redundant"):
            for name, settings in SETTINGS.items():
                params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: grid.placements[i])
                states = step_twice(params, replicas=replicas, **settings).state
                for param, whole in zip(params, expected[name], strict=True):
                    for key, value in {"param": param, **states[param]}.items():
                        layout = Layout(tuple(value.shape), tuple(mesh.shape), tuple(value.placements))
                        part = local_part(whole[key], layout, tuple(mesh.get_coordinate()))
                        assert torch.equal(value.to_local(), part), (replicas, name, key)

    run_ranks(run, torch.Size(grid.mesh_shape).numel())


def test_shared_work_is_done_once_and_sends_what_the_plan_says() -> None:
    def run(rank: int, world_size: int) -> tuple[int, list[float]]:
        mesh = init_device_mesh("cpu", (2, 2))
        grid, orthogonalized = GRIDS["2 replicas of 2"], []

        def count(stack: Tensor) -> Tensor:
            orthogonalized.extend(stack)
            return stack

        params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: grid.placements[i])
        optimizer = Muon(params, orthogonalize=count, placement="owner", replicas="shared")
        give_grads(params, matrices(1, SHAPES))
        optimizer.step()
        with count_traffic() as traffic:
            optimizer.step()
        (plan,) = optimizer.plan().steps
        assert "replicas share, 4 ranks" in str(optimizer.plan())
        assert dict(traffic.sent_bytes) == {"all_to_all": plan.sent[rank]}
        return len(orthogonalized), list(plan.loads)

    results = run_ranks(run, 4)
    assert sum(count for count, _ in results) == 2 * 7  # in two steps; the stack is three matrices
    assert all(loads == results[0][1] and min(loads) > 0 for _, loads in results)


@pytest.mark.parametrize("blocks", [None, Blocks()])
def test_a_hybrid_sharded_model_trains_the_same_when_replicas_share(blocks: Blocks | None) -> None:
    """Each rank has its own batch; the all-reduce makes the gradients of all replicas the same bits."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        models = []
        for replicas in ("redundant", "shared"):
            torch.manual_seed(0)
            model = fully_shard(Net(), mesh, shard_placement_fn=lambda param: blocks)
            optimizer = Muon(model.named_parameters(), lr=0.02, placement="owner", replicas=replicas)
            for step in range(3):
                x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append([param.full_tensor().detach() for param in model.parameters()])
        assert all(map(torch.equal, *models))
        return models[1]

    first, *others = run_ranks(run, 4)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("missing", ["symmetric", "agree"])
def test_a_parameter_without_gradient_stays_as_it_is_when_replicas_share(missing: str) -> None:
    whole = [nn.Parameter(v) for v in matrices(0, SHAPES)]
    optimizer = Muon(whole, lr=0.02)
    for absent in (0, 3):
        give_grads(whole, matrices(1, SHAPES))
        whole[absent].grad = None
        optimizer.step()

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        placements = GRIDS["2 replicas of 2"].placements
        params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: placements[i])
        optimizer = Muon(params, lr=0.02, replicas="shared", missing_grads=missing)
        for absent in (0, 3):
            give_grads(params, matrices(1, SHAPES))
            params[absent].grad = None
            optimizer.step()
        for param, expected in zip(params, whole, strict=True):
            assert torch.equal(param.full_tensor(), expected)

    run_ranks(run, 4)


def test_replicas_that_share_agree_on_a_gradient_that_one_of_them_lacks() -> None:
    """No hang: what one has is stepped by all, from the gradient of the worker's replica."""

    def run(rank: int, world_size: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2))
        (param,) = sharded(matrices(0, [(48, 32)]), mesh, lambda i, shape: (R, rows_of(48, 2)))
        optimizer = Muon([param], lr=0.02, replicas="shared", missing_grads="agree", placement="owner")
        give_grads([param], matrices(1, [(48, 32)]))
        if rank >= 2:
            param.grad = None
        optimizer.step()
        return param.full_tensor().detach()

    results = run_ranks(run, 4)
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert not torch.equal(results[0], matrices(0, [(48, 32)])[0])
