"""What went wrong in other sharded optimizers, each as a test that all of these pass.

Muon, NorMuon, AdamW and AdamW8bit go through the same ones. Beside them: an embedding is not sent to Muon
(`test_optim_parts.py`); a step under hybrid sharding gathers no full tensor, and Newton and Schulz on a shard
is seen (`test_muon.py`); tiny gradients, and a momentum that is divided in place (`test_muon_maths.py`);
ranks that die or skip a step (`test_optim_absent.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from shardkit import Blocks, clip_grad_norm_, fully_shard
from shardkit.optim import AdamW, AdamW8bit, Muon
from shardkit.placement import RaggedShard
from shardkit.ragged import distribute_tensor
from tests.parity.test_muon import Net, assert_same, give_grads, matrices, rows_of, sharded
from tests.support.ranks import run_ranks

Make = Callable[[object], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Make] = {
    "muon": lambda params: Muon(params, lr=0.02),
    "normuon": lambda params: Muon(params, lr=0.02, row_norm_beta2=0.95),
    "adamw": lambda params: AdamW(params, lr=0.02),
    "adamw8bit": lambda params: AdamW8bit(params, lr=0.02, min_numel=1),
}
TORCH: Mapping[str, Make] = {
    "muon": lambda params: torch.optim.Muon(params, lr=0.02, adjust_lr_fn="match_rms_adamw"),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=True),
}
SHAPES = [(24, 80), (2, 40), (33, 40), (48, 32)]
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def scattered(i: int, shape: Sequence[int], world_size: int) -> list[Placement]:
    """On one rank alone, on fewer ranks than there are, with a hole in the middle, evenly."""
    alone = [0] * world_size
    alone[1 % world_size] = shape[0]
    return [[RaggedShard((0,), tuple(alone)), Shard(0), rows_of(shape[0], world_size), Shard(0)][i % 4]]


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_of(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Full parameters and state, in a fixed order."""
    found = []
    for param in params:
        found += [full(param), *(full(value) for _, value in sorted(optimizer.state[param].items()))]
    return found


def assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(got) == len(expected)
    different = [i for i, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]
    assert not different, different


def steps(params: Sequence[Tensor], optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        give_grads(params, matrices(step + 1, [tuple(p.shape) for p in params]))
        optimizer.step()


def on_one_process(name: str, num_steps: int) -> list[Tensor]:
    params = [nn.Parameter(v) for v in matrices(0, SHAPES)]
    optimizer = OPTIMIZERS[name](params)
    steps(params, optimizer, 0, num_steps)
    return whole_of(params, optimizer)


# ---------------------------------------------------------------- shards and state


@each_optimizer
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_hold_nothing_take_part(name: str, world_size: int) -> None:
    """Elsewhere: a hang, or a crash on the empty shard. What a rank did not work on is kept all the same."""
    expected = on_one_process(name, 2)

    def run(rank: int, world_size: int) -> bool:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: scattered(i, shape, world_size))
        optimizer = OPTIMIZERS[name](params)
        steps(params, optimizer, 0, 2)
        assert_equal(whole_of(params, optimizer), expected)
        return any(param.to_local().numel() == 0 for param in params)

    assert any(run_ranks(run, world_size))


class Matrices(nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world_size,))
        laid = sharded(matrices(0, SHAPES), mesh, lambda i, shape: scattered(i, shape, world_size))
        self.weights = nn.ParameterList(laid)


@each_optimizer
@pytest.mark.parametrize("first", [0, 2])
def test_a_new_optimizer_loads_a_checkpoint_before_its_first_step(
    name: str, first: int, tmp_path: Path
) -> None:
    """Elsewhere: state made by the first step, so that nothing could be loaded; of a run not begun, too."""
    expected = on_one_process(name, 3)

    def run(rank: int, world_size: int, stage: int) -> None:
        model = Matrices(world_size)
        params = list(model.parameters())
        optimizer = OPTIMIZERS[name](model.named_parameters())
        if stage == 0:
            steps(params, optimizer, 0, first)
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        if stage == 0:
            dcp.save(state, checkpoint_id=tmp_path)
            return
        dcp.load(state, checkpoint_id=tmp_path)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        steps(params, optimizer, first, 3)
        assert_equal(whole_of(params, optimizer), expected)

    run_ranks(run, 2, 0)
    run_ranks(run, 3, 1)


@each_optimizer
def test_state_loads_by_keyword_as_torch_passes_it(name: str) -> None:
    """Elsewhere: a `load_state_dict` with a parameter of another name, which broke every resume."""
    params = [nn.Parameter(v) for v in matrices(0, SHAPES)]
    optimizer = OPTIMIZERS[name](params)
    steps(params, optimizer, 0, 2)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = OPTIMIZERS[name](others)
    resumed.load_state_dict(state_dict=copy.deepcopy(optimizer.state_dict()))
    steps(params, optimizer, 2, 3)
    steps(others, resumed, 2, 3)
    assert_equal(whole_of(others, resumed), whole_of(params, optimizer))


# ---------------------------------------------------------------- gradients


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + rank))


@each_optimizer
@pytest.mark.parametrize("blocks", [None, Blocks()])
def test_ranks_with_different_batches_stay_one_model(name: str, blocks: Blocks | None) -> None:
    """Elsewhere: updates from a rank's own gradients, which drift apart. Two ranks add to the same bits."""

    def run(rank: int, world_size: int) -> list[Tensor]:
        torch.manual_seed(0)
        whole, model = Net(), Net()
        model.load_state_dict(whole.state_dict())
        fully_shard(model, shard_placement_fn=lambda param: blocks)
        oracle, optimizer = (OPTIMIZERS[name](net.named_parameters()) for net in (whole, model))
        for step in range(3):
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            total = [torch.zeros_like(param) for param in whole.parameters()]
            for other in range(world_size):
                grads = torch.autograd.grad(
                    whole(batch(other, step)).square().mean(), list(whole.parameters())
                )
                torch._foreach_add_(total, grads)
            for param, grad in zip(whole.parameters(), total, strict=True):
                param.grad = grad / world_size
            oracle.step()
        assert_same(list(model.parameters()), list(whole.parameters()))
        return [full(param) for param in model.parameters()]

    first, second = run_ranks(run, 2)
    assert_equal(first, second)


def clipped(net: nn.Module, optimizer: torch.optim.Optimizer, limit: float, micro_batches: int) -> None:
    """Three steps on the same batch in one or several parts, whose gradients are of very different sizes."""
    for step in range(3):
        for part in batch(0, step).chunk(micro_batches):
            (net(part * 10.0**-step).square().mean() / micro_batches).backward()
        clip = clip_grad_norm_ if isinstance(next(net.parameters()), DTensor) else nn.utils.clip_grad_norm_
        clip(net.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["muon", "normuon"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_clipped_before_newton_and_schulz_and_accumulate_to_one_batch(
    name: str, world_size: int
) -> None:
    """Elsewhere: clipped updates, or a momentum that took each micro-batch for a step. In float32 to 1e-6."""
    settings = {"lr": 0.02, "ns_dtype": torch.float32, "row_norm_beta2": 0.95 if name == "normuon" else None}
    limit = 1e-3

    def trained(limit: float) -> list[Tensor]:
        torch.manual_seed(0)
        net = Net()
        clipped(net, Muon(net.parameters(), **settings), limit, 1)
        return [full(param) for param in net.parameters()]

    expected, unclipped = trained(limit), trained(1e9)
    assert max((a - b).abs().max() for a, b in zip(expected, unclipped, strict=True)) > 1e-3

    def run(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        net = fully_shard(Net(), shard_placement_fn=lambda param: Blocks.elements())
        clipped(net, Muon(net.parameters(), **settings), limit, 4)
        for got, whole in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(got.full_tensor().detach(), whole, rtol=0, atol=1e-6)

    run_ranks(run, world_size)


def test_newton_and_schulz_run_once_a_step_whatever_the_micro_batches() -> None:
    def run(rank: int, world_size: int) -> int:
        num_matrices = 0

        def orthogonalize(stack: Tensor) -> Tensor:
            nonlocal num_matrices
            num_matrices += len(stack)
            return stack

        model = fully_shard(Net(), shard_placement_fn=lambda param: Blocks())
        optimizer = Muon(model.parameters(), orthogonalize=orthogonalize, placement="owner")
        for step in range(2):
            for micro_batch in range(4):
                model(batch(micro_batch, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return num_matrices

    assert sum(run_ranks(run, 2)) == 2 * 2  # matrices and steps


@each_optimizer
def test_missing_gradients_frozen_parameters_and_idle_groups_are_left_alone(name: str) -> None:
    """As torch does; and a parameter whose first gradient comes late is stepped from then on."""

    def train(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
        optimizer = make([{"params": params[:2]}, {"params": params[2:3]}, {"params": params[3:]}])
        params[3].requires_grad_(False)
        for step in range(3):
            give_grads(params, matrices(step + 1, SHAPES))
            params[3].grad = None
            if step == 0:
                params[0].grad = None  # comes late
            if step == 1:
                params[2].grad = None  # all of its group
            optimizer.step()
        return optimizer

    whole = [nn.Parameter(v) for v in matrices(0, SHAPES)]
    expected = whole_of(whole, train(whole, OPTIMIZERS[name]))
    assert torch.equal(whole[3], matrices(0, SHAPES)[3])
    if name in TORCH:
        oracle = [nn.Parameter(v) for v in matrices(0, SHAPES)]
        train(oracle, TORCH[name])
        assert_equal(whole, oracle)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: scattered(i, shape, world_size))
        assert_equal(whole_of(params, train(params, OPTIMIZERS[name])), expected)

    run_ranks(run, 3)


@each_optimizer
def test_an_overflow_on_one_rank_is_a_step_that_no_rank_takes(name: str) -> None:
    """Elsewhere: an infinity in the momentum for good. The scaler of every rank finds it and skips."""

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: scattered(i, shape, world_size))
        optimizer, scaler = OPTIMIZERS[name](params), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        give_grads(params, [4.0 * grad for grad in matrices(1, SHAPES)])
        scaler.step(optimizer)
        scaler.update()
        before = whole_of(params, optimizer)
        give_grads(params, matrices(2, SHAPES))
        if rank == 1:
            params[0].grad.to_local()[3, 5] = float("inf")  # the only rank that holds any of it
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert_equal(whole_of(params, optimizer), before)
        give_grads(params, [2.0 * grad for grad in matrices(2, SHAPES)])
        scaler.step(optimizer)
        assert_equal(whole_of(params, optimizer), expected)

    expected = on_one_process(name, 2)
    run_ranks(run, 2)


# ---------------------------------------------------------------- blocks of 8-bit moments


@pytest.mark.parametrize(
    ("shape", "world_size"), [((24, 256), 2), ((33, 256), 4), ((64, 200), 4), ((64, 200), 3)]
)
def test_a_shard_that_is_no_whole_number_of_blocks_keeps_codes_and_numbers(
    shape: tuple[int, int], world_size: int
) -> None:
    """Elsewhere: float32 state without a word, and results that change with the number of ranks."""
    whole = [nn.Parameter(v) for v in matrices(0, [shape])]
    oracle = AdamW8bit(whole, lr=0.02)
    steps(whole, oracle, 0, 3)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        for placement in (Shard(0), rows_of(shape[0], world_size)):
            params = [nn.Parameter(distribute_tensor(matrices(0, [shape])[0], mesh, [placement]))]
            optimizer = AdamW8bit(params, lr=0.02)
            assert optimizer.state[params[0]]["exp_avg_codes"].dtype == torch.uint8
            steps(params, optimizer, 0, 3)
            assert_equal(whole_of(params, optimizer), whole_of(whole, oracle))

    run_ranks(run, world_size)


def test_codes_go_from_2_to_4_to_3_to_2_ranks_at_boundaries_inside_flat_blocks(tmp_path: Path) -> None:
    """Rows of 200: no boundary but the ends is a multiple of 256 elements. Elsewhere it does not load."""
    shape, counts = (64, 200), (2, 4, 3, 2)
    whole = [nn.Parameter(v) for v in matrices(0, [shape])]
    oracle = AdamW8bit(whole, lr=0.02)
    steps(whole, oracle, 0, len(counts))

    def run(rank: int, world_size: int, stage: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        layout = [rows_of(64, world_size)] if stage % 2 else [Shard(0)]
        model = nn.ParameterList(sharded(matrices(0, [shape]), mesh, lambda i, shape: layout))
        params, optimizer = list(model), AdamW8bit(model.named_parameters(), lr=0.02)
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        if stage:
            dcp.load(state, checkpoint_id=tmp_path / str(stage - 1))
            model.load_state_dict(state["model"])
            set_optimizer_state_dict(model, optimizer, state["optim"])
        steps(params, optimizer, stage, stage + 1)
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=tmp_path / str(stage))
        if stage == len(counts) - 1:
            assert_equal(whole_of(params, optimizer), whole_of(whole, oracle))

    for stage, world_size in enumerate(counts):
        run_ranks(run, world_size, stage)
