"""Checkpoints: DCP across world sizes and to and from torch's FSDP2, full state dicts, live state dicts."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardkit
from shardkit import Blocks, fully_shard
from tests.support.models import CASES
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import run_ranks

CASE = CASES["few_rows"]  # rows: 1, 2 and 3
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    """Every rank has the same batch, so that any number of ranks trains alike."""
    for step in steps:
        optimizer.zero_grad()
        CASE.loss(model, step).backward()
        optimizer.step()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_params_close(model: nn.Module, reference: nn.Module) -> None:
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param.detach()), expected.detach(), rtol=1e-5, atol=1e-6)


def reference_after(num_steps: int) -> nn.Module:
    reference = CASE.build()
    train(reference, adamw(reference), range(num_steps))
    return reference


def save(library: Any, path: Path, num_ranks: int, **options: object) -> None:
    def check(rank: int, world_size: int) -> None:
        model = CASE.sharded(library.fully_shard, **options)
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)

    run_ranks(check, num_ranks)


def load_and_go_on(library: Any, path: Path, num_ranks: int, **options: object) -> None:
    reference = reference_after(4)

    def check(rank: int, world_size: int) -> None:
        model = CASE.sharded(library.fully_shard, **options)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.0)
        optimizer = adamw(model)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(model, optimizer, range(2, 4))
        assert_params_close(model, reference)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (4, 1), (1, 4), (3, 2)])
def test_a_checkpoint_goes_on_over_another_number_of_ranks(
    saved_on: int, loaded_on: int, tmp_path: Path
) -> None:
    save(shardkit, tmp_path, saved_on)
    load_and_go_on(shardkit, tmp_path, loaded_on)


def test_checkpoints_go_to_and_from_torchs_fsdp2(tmp_path: Path) -> None:
    save(shardkit, tmp_path / "ours", 2)
    load_and_go_on(torch_fsdp, tmp_path / "ours", 3)
    save(torch_fsdp, tmp_path / "theirs", 3)
    load_and_go_on(shardkit, tmp_path / "theirs", 2)


def test_a_checkpoint_of_a_hybrid_mesh_loads_on_a_flat_one(tmp_path: Path) -> None:
    def save_hybrid(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = CASE.sharded(fully_shard, mesh=mesh)
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)

    run_ranks(save_hybrid, 4)
    load_and_go_on(shardkit, tmp_path, 3)


def test_what_is_on_disk_is_the_logical_tensor(tmp_path: Path) -> None:
    """Read back into plain tensors, without any sharding."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.a, self.b = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(2, 12))
            self.c, self.d = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(7, 2, 2))

    def check(rank: int, world_size: int) -> None:
        model = Bag()
        fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.shape[-1] == 12 else None)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path)

    def read(rank: int, world_size: int) -> None:
        state = {name: torch.full_like(value, float("nan")) for name, value in Bag().state_dict().items()}
        dcp.load(state, checkpoint_id=tmp_path)
        for name, value in Bag().state_dict().items():
            assert torch.equal(state[name], value), name

    run_ranks(check, 3)
    run_ranks(read, 1)


# ---------------------------------------------------------------- full state dicts


def test_full_state_dicts_of_model_and_optimizer_come_from_rank_0_and_go_back() -> None:
    def check(rank: int, world_size: int) -> None:
        source = CASE.build()
        source_optimizer = adamw(source)
        train(source, source_optimizer, range(2))
        optimizer_state = copy.deepcopy(  # a load would share the step counts
            get_optimizer_state_dict(source, source_optimizer, options=StateDictOptions(full_state_dict=True))
        )
        model = CASE.sharded(fully_shard)
        optimizer = adamw(model)
        set_model_state_dict(model, source.state_dict() if rank == 0 else {}, options=FROM_RANK_0)
        set_optimizer_state_dict(model, optimizer, optimizer_state if rank == 0 else {}, options=FROM_RANK_0)
        for param, expected in zip(model.parameters(), source.parameters(), strict=True):
            assert torch.equal(full(param), expected)
            for name in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[param][name]
                assert isinstance(moment, DTensor)
                assert torch.equal(full(moment), source_optimizer.state[expected][name])
        train(model, optimizer, range(2, 4))
        train(source, source_optimizer, range(2, 4))
        assert_params_close(model, source)
        state = get_model_state_dict(model, options=FULL)
        assert list(state) == (list(source.state_dict()) if rank == 0 else [])
        for name, value in state.items():
            torch.testing.assert_close(value, source.state_dict()[name], rtol=1e-5, atol=1e-6)

    run_ranks(check, 3)


def test_a_load_keeps_ties() -> None:
    case = CASES["tied"]

    def check(rank: int, world_size: int) -> None:
        model, new = case.sharded(fully_shard), case.build()
        with torch.no_grad():
            new.embed.weight.add_(1.0)
        assert {"embed.weight", "head.weight"} <= model.state_dict().keys()
        set_model_state_dict(model, new.state_dict() if rank == 0 else {}, options=FROM_RANK_0)
        assert model.embed.weight is model.head.weight
        case.loss(model, rank).backward()
        assert_grads_equal(model, oracle_grads(new, case.loss, world_size), world_size)

    run_ranks(check, 2)


def test_optimizer_state_of_frozen_and_unused_parameters_goes_out_and_in() -> None:
    case = CASES["frozen"]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        case.loss(model, number).backward()
        optimizer.step()

    def check(rank: int, world_size: int) -> None:
        model = case.sharded(fully_shard)
        optimizer = adamw(model)
        step(model, optimizer, 0)
        state = copy.deepcopy(
            get_optimizer_state_dict(model, optimizer)
        )  # a load would share the step counts
        other = case.sharded(fully_shard)
        other_optimizer = adamw(other)
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, other_optimizer, state)
        for m, o in ((model, optimizer), (other, other_optimizer)):
            step(m, o, 1)
        for param, expected in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(param), full(expected))

    run_ranks(check, 2)


# ---------------------------------------------------------------- live state dicts


def run_nothing(model: nn.Module, rank: int) -> None:
    return None


def run_forward(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        CASE.loss(model, rank)


def run_backward(model: nn.Module, rank: int) -> None:
    CASE.loss(model, rank).backward()
    model.zero_grad()


def cast_there_and_back(model: nn.Module, rank: int) -> None:
    model.double().float()


@pytest.mark.parametrize("before", [run_nothing, run_forward, run_backward, cast_there_and_back])
def test_a_state_dict_is_live_whenever_it_was_taken(before: Callable[[nn.Module, int], None]) -> None:
    """It shares its bytes with the parameters: a step shows in it, and what is loaded into it is trained."""

    def check(rank: int, world_size: int) -> None:
        model = CASE.sharded(fully_shard)
        before(model, rank)
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        for name, param in model.named_parameters():
            assert torch.equal(state[name].to_local(), param.to_local()), f"{name} after steps"
        with torch.no_grad():
            for value in state.values():
                value.fill_(0.25)
        for name, param in model.named_parameters():
            assert (full(param) == 0.25).all(), f"{name} after a write to the state dict"
        unsharded = CASE.build()
        with torch.no_grad():
            for param in unsharded.parameters():
                param.fill_(0.25)
            assert torch.equal(CASE.loss(model, rank), CASE.loss(unsharded, rank))

    run_ranks(check, 3)


def test_a_state_dict_between_forward_and_backward_does_no_harm() -> None:
    def check(rank: int, world_size: int) -> None:
        model = CASE.sharded(fully_shard, reshard_after_forward=False)
        loss = CASE.loss(model, rank)
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        for name, expected in CASE.build().state_dict().items():
            assert torch.equal(full(state[name]), expected)
        loss.backward()
        assert_grads_equal(model, oracle_grads(CASE.build(), CASE.loss, world_size), world_size)

    run_ranks(check, 2)


def test_a_dropped_model_is_collected() -> None:
    def check(rank: int, world_size: int) -> None:
        model = CASE.sharded(fully_shard)
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        state = get_model_state_dict(model, options=FULL)
        alive = [weakref.ref(model), weakref.ref(model.layers[0])]
        alive += [weakref.ref(p) for p in model.parameters()]
        del model, optimizer, state
        gc.collect()
        assert not any(ref() is not None for ref in alive)

    run_ranks(check, 2)


@pytest.mark.parametrize("wish", [None, Blocks.elements()], ids=str)
def test_sharded_parameters_are_copied_and_pickled_on_every_rank(wish: Blocks | None) -> None:
    """torch refuses DTensors whose shell keeps the offset of their part in the whole parameter."""

    def run(rank: int, world_size: int) -> None:
        layer = fully_shard(nn.Linear(6, 7), shard_placement_fn=lambda param: wish)
        for param in layer.parameters():
            for twin in (copy.deepcopy(param), pickle.loads(pickle.dumps(param))):
                assert twin.placements == param.placements and twin.shape == param.shape
                assert torch.equal(twin.to_local(), param.to_local())
                assert (
                    twin.to_local().data_ptr() != param.to_local().data_ptr() or not param.to_local().numel()
                )

    run_ranks(run, 3)
