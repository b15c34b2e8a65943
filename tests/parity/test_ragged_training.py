"""Stock optimizers, clipping, GradScaler and autograd on RaggedTensors, against the unsharded parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardkit.placement import RaggedShard
from shardkit.ragged import RaggedTensor, distribute_tensor
from tests.parity.ragged_layouts import CASES, mesh_of, values
from tests.support.ranks import run_ranks

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw_default": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam_amsgrad_maximize": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, maximize=True, foreach=True),
    "adamw_fused_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
}


# those that torch itself has no rule for on its own DTensors
RAGGED_ALONE: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def _parameters(mesh: DeviceMesh, placements: object, shape: tuple[int, ...]) -> list[torch.nn.Parameter]:
    """Ragged, stock-sharded and replicated ones, as a partly ragged model has."""
    made = [distribute_tensor(values(shape, 1) / 4, mesh, placements)]
    made += [distribute_tensor(values((8, 2), 2) / 4, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))]
    return [torch.nn.Parameter(t) for t in made]


def _train(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        mesh = mesh_of(case)
        for name, make in OPTIMIZERS.items():
            plain = [
                torch.nn.Parameter(values(shape, seed) / 4) for seed, shape in ((1, case.shape), (2, (8, 2)))
            ]
            sharded = _parameters(mesh, case.placements, case.shape)
            optimizers = [make(plain), make(sharded)]
            for step in range(3):
                for p, q in zip(plain, sharded, strict=True):
                    p.grad = values(tuple(p.shape), 10 + step)
                    q.grad = distribute_tensor(p.grad, mesh, q.placements)
                for optimizer in optimizers:
                    optimizer.step()
            for p, q in zip(plain, sharded, strict=True):
                _assert_as_trained(q, p.detach(), name, f"{name} at {case}")
                for key, state in optimizers[0].state[p].items():
                    got = optimizers[1].state[q][key]
                    assert isinstance(got, DTensor) == (key not in ("step", "mu_product")), f"{name}.{key}"
                    _assert_as_trained(got, state, name, f"{name}.{key} at {case}")


def _assert_as_trained(got: torch.Tensor, expected: torch.Tensor, name: str, what: str) -> None:
    """Bit-equal, except that fused CPU kernels round a vector's body and its tail differently."""
    got = got.full_tensor().detach() if isinstance(got, DTensor) else got
    if "fused" in name:
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=what)
    else:
        assert torch.equal(got, expected), what


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_stock_optimizers_train_ragged_parameters_as_whole_ones(world_size):
    run_ranks(_train, world_size, timeout=90)


def _adafactor(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        if len(case.shape) < 2:
            continue
        mesh = mesh_of(case)
        p = torch.nn.Parameter(values(case.shape, 1))
        q = torch.nn.Parameter(distribute_tensor(values(case.shape, 1), mesh, case.placements))
        p.grad, q.grad = (
            values(case.shape, 2),
            distribute_tensor(values(case.shape, 2), mesh, case.placements),
        )
        torch.optim.Adafactor([p], foreach=False).step()
        try:
            torch.optim.Adafactor([q], foreach=False).step()
        except NotImplementedError as error:
            assert str(error).startswith("aten."), error
        else:
            torch.testing.assert_close(q.full_tensor(), p.detach())


def test_adafactor_agrees_or_refuses_by_name():
    run_ranks(_adafactor, 3)


def _clip(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        mesh = mesh_of(case)
        for norm_type in (2.0, 1.0, math.inf):
            for foreach in (True, False, None):
                sharded = _parameters(mesh, case.placements, case.shape)
                plain = [torch.nn.Parameter(p.full_tensor().detach().clone()) for p in sharded]
                for p, q in zip(plain, sharded, strict=True):
                    p.grad = values(tuple(p.shape), 5)
                    q.grad = distribute_tensor(p.grad, mesh, q.placements)
                total = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm_type, foreach=foreach)
                got = torch.nn.utils.clip_grad_norm_(sharded, 0.5, norm_type, foreach=foreach)
                torch.testing.assert_close(got.full_tensor(), total)
                for p, q in zip(plain, sharded, strict=True):
                    torch.testing.assert_close(q.grad.full_tensor(), p.grad)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_clipping_sees_the_norm_of_all_shards(world_size):
    run_ranks(_clip, world_size)


def _nan_clip(rank: int, world_size: int) -> None:
    case = CASES[3][0]
    mesh = mesh_of(case)
    gradient = values(case.shape)
    gradient[3, 1] = math.nan  # on rank 1
    p = torch.nn.Parameter(distribute_tensor(values(case.shape), mesh, case.placements))
    p.grad = distribute_tensor(gradient, mesh, case.placements)
    for norm_type in (2.0, math.inf):
        assert torch.nn.utils.get_total_norm([p.grad], norm_type).full_tensor().isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_([p], 1.0, math.inf, error_if_nonfinite=True)


def test_a_nan_on_one_rank_is_a_nan_in_every_norm():
    run_ranks(_nan_clip, 3)


def _scaler(rank: int, world_size: int, bad: float) -> None:
    for case in CASES[world_size]:
        mesh = mesh_of(case)
        for fused in (False, True):
            parameters = _parameters(mesh, case.placements, case.shape)
            before = [p.full_tensor().detach().clone() for p in parameters]
            optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.zeros(()))
            for p in parameters:
                gradient = torch.ones(p.shape, dtype=torch.float64) * 8
                if p is parameters[0]:
                    gradient.view(-1)[gradient.numel() // 2] = bad  # in one rank's shard alone
                p.grad = distribute_tensor(gradient, mesh, p.placements)
            scaler.step(optimizer)
            scaler.update()
            stepped = [not torch.equal(p.full_tensor(), b) for p, b in zip(parameters, before, strict=True)]
            assert stepped == [math.isfinite(bad)] * 2, f"fused={fused} at {case}"
            assert scaler.get_scale() == (4.0 if math.isfinite(bad) else 2.0)
            if not fused and math.isfinite(bad):
                assert torch.equal(
                    parameters[1].grad.full_tensor(), torch.full((8, 2), 2.0, dtype=torch.float64)
                )


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("bad", [8.0, math.inf, math.nan])
def test_an_inf_on_one_rank_makes_all_ranks_skip(world_size, bad):
    run_ranks(_scaler, world_size, bad)


def _autograd(rank: int, world_size: int) -> None:
    for case in CASES[world_size]:
        mesh = mesh_of(case)
        a, b = values(case.shape, 1), values(case.shape, 2)

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scaled = x * y + x.abs()
            if x.ndim > 1:
                scaled = scaled + x.sum(-1, keepdim=True) * 0.5
            return (scaled * scaled).sum() + x.mean()

        whole = a.clone().requires_grad_()
        loss(whole, b).backward()
        sharded = distribute_tensor(a, mesh, case.placements).requires_grad_()
        got = loss(sharded, distribute_tensor(b, mesh, case.placements))
        got.backward()
        assert type(sharded.grad) is RaggedTensor
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, msg=f"{case}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_autograd_through_operators_gives_the_whole_tensors_gradient(world_size):
    run_ranks(_autograd, world_size)


def _hsdp_step(rank: int, world_size: int) -> None:
    """All three axes: replicas stay equal through a step."""
    case = CASES[4][-1]
    mesh = mesh_of(case)
    p = torch.nn.Parameter(distribute_tensor(values(case.shape), mesh, case.placements))
    q = torch.nn.Parameter(values(case.shape))
    q.grad = values(case.shape, 3)
    p.grad = distribute_tensor(q.grad, mesh, case.placements)
    for parameter in (p, q):
        torch.optim.AdamW([parameter], lr=0.1, foreach=True).step()
    assert torch.equal(p.full_tensor(), q)


def test_replicate_ragged_and_tensor_parallel_axes_train_together():
    run_ranks(_hsdp_step, 4)


def _empty_rank(rank: int, world_size: int) -> None:
    """Ranks without rows hold no element and answer all the same."""
    mesh = mesh_of(CASES[3][0])
    t = distribute_tensor(values((5, 3)), mesh, [RaggedShard((0,), (0, 5, 0))])
    assert t.to_local().numel() == (15 if rank == 1 else 0)
    assert t.max().full_tensor() == values((5, 3)).max()
    assert t.norm(-math.inf).full_tensor() == values((5, 3)).abs().min()
    assert torch.equal(t.amin(0).full_tensor(), values((5, 3)).amin(0))


def test_ranks_without_rows_answer_too():
    run_ranks(_empty_rank, 3)
