"""Clipping on 4 gloo ranks against torch's clipping of the same gradients unsharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit import Blocks, RaggedTensor, clip_grad_norm_, fully_shard
from tests.support.ranks import errors_on_all_ranks, run_ranks

NORMS = (1.0, 2.0, 3.5, math.inf)
MAX_NORM = 0.01


def grid(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def full_grads(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The same random gradients on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def with_grad(grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


def distributed(grad: Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    return with_grad(distribute_tensor(grad, mesh, placements))


def assert_clips_as_torch(
    params: Sequence[Tensor], grads: Sequence[Tensor], norm_type: float, **kwargs: bool
) -> None:
    """`params` carry `grads` in some layout; norm and gathered gradients must come out as torch's."""
    unsharded = [with_grad(grad.clone()) for grad in grads]
    expected = nn.utils.clip_grad_norm_(unsharded, MAX_NORM, norm_type)
    norm = clip_grad_norm_(params, MAX_NORM, norm_type, **kwargs)
    assert type(norm) is Tensor
    assert norm.shape == ()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0, check_dtype=False)
    norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    assert all(torch.equal(norm, other) for other in norms)
    for param, reference in zip(params, unsharded, strict=True):
        gathered = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        torch.testing.assert_close(gathered, reference.grad, rtol=1e-6, atol=1e-9)


def on_four_ranks(check: Callable[[], None]) -> None:
    run_ranks(lambda rank, world_size: check(), 4)


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("norm_type", NORMS)
def test_one_part_hybrid_one_part_flat(norm_type: float) -> None:
    def check() -> None:
        grads = full_grads([(8, 3), (5, 2), (6, 4), (7,)])
        hybrid, flat = grid("replicate", "shard"), init_device_mesh("cpu", (4,))
        params = [
            distributed(grads[0], hybrid, Replicate(), Shard(0)),
            distributed(grads[1], flat, Shard(0)),
            distributed(grads[2], hybrid, Replicate(), Shard(1)),
            distributed(grads[3], flat, Shard(0)),
        ]
        assert_clips_as_torch(params, grads, norm_type)

    on_four_ranks(check)


@pytest.mark.parametrize("norm_type", NORMS)
def test_tensor_parallel_strided_replicated_and_plain_in_one_call(norm_type: float) -> None:
    def check() -> None:
        mesh = grid("dp", "tp")
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3))
        torch.manual_seed(1)
        grads = [torch.randn_like(param) for param in model.parameters()]
        ignored = set(model[3].parameters())
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"], ignored_params=ignored)
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = (
                distribute_tensor(grad, param.device_mesh, param.placements)
                if isinstance(param, DTensor)
                else grad.clone()
            )
        assert "_StridedShard" in {type(p).__name__ for q in model[1].parameters() for p in q.placements}
        assert_clips_as_torch(list(model.parameters()), grads, norm_type)

    on_four_ranks(check)


@pytest.mark.parametrize("norm_type", NORMS)
def test_ragged_beside_even_shards(norm_type: float) -> None:
    def check() -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.Linear(7, 2))
        fully_shard(model[0], mesh=grid("replicate", "shard"), shard_placement_fn=lambda param: Blocks())
        fully_shard(model[1], shard_placement_fn=lambda param: Blocks())
        fully_shard(model)
        model(torch.full((2, 5), 1.0 + dist.get_rank())).square().sum().backward()
        assert isinstance(model[0].weight.grad, RaggedTensor)
        grads = [param.grad.full_tensor() for param in model.parameters()]
        assert_clips_as_torch(list(model.parameters()), grads, norm_type)

    on_four_ranks(check)


@pytest.mark.parametrize("norm_type", NORMS)
def test_empty_shards_add_nothing(norm_type: float) -> None:
    def check() -> None:
        grads = full_grads([(1, 3), (2,), (5, 1)])
        flat = init_device_mesh("cpu", (4,))
        assert_clips_as_torch([distributed(grad, flat, Shard(0)) for grad in grads], grads, norm_type)

    on_four_ranks(check)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_partial_gradients_are_reduced_before_the_norm(norm_type: float, reduce_op: str) -> None:
    def check() -> None:
        mesh = grid("dp", "tp")
        (grad,) = full_grads([(4, 6)])
        summand = distribute_tensor(grad, mesh, [Shard(0), Replicate()]).to_local()
        weight = (1.0, 3.0)[mesh.get_local_rank("tp")] / (4.0 if reduce_op == "sum" else 2.0)
        placements = [Shard(0), Partial(reduce_op)]
        param = with_grad(DTensor.from_local(summand * weight, mesh, placements))
        assert_clips_as_torch([param], [grad], norm_type)
        assert list(param.grad.placements) == placements

    on_four_ranks(check)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_foreach_changes_nothing(foreach: bool, norm_type: float) -> None:
    def check() -> None:
        grads = full_grads([(8, 3), (5,)])
        flat = init_device_mesh("cpu", (4,))
        params = [distributed(grads[0], flat, Shard(0)), with_grad(grads[1].clone())]
        assert_clips_as_torch(params, grads, norm_type, foreach=foreach)

    on_four_ranks(check)


def test_gradients_below_max_norm_keep_their_bits() -> None:
    def check() -> None:
        (grad,) = full_grads([(9, 2)])
        param = distributed(grad, init_device_mesh("cpu", (4,)), Shard(0))
        clip_grad_norm_([param], 1e9)
        assert torch.equal(param.grad.full_tensor(), grad)

    on_four_ranks(check)


def test_a_gradient_may_be_none_on_some_ranks() -> None:
    def check() -> None:
        flat = init_device_mesh("cpu", (4,))
        params = [nn.Parameter(distribute_tensor(torch.zeros(4), flat, [Shard(0)])) for _ in range(2)]
        if dist.get_rank() != 2:
            params[0].grad = DTensor.from_local(torch.full((1,), 2.0), flat, [Shard(0)])
        norm = clip_grad_norm_(params, 1.0)
        torch.testing.assert_close(norm, torch.tensor(math.sqrt(12.0)))
        assert params[1].grad is None

    on_four_ranks(check)


def test_bfloat16_gradients_are_measured_in_float32() -> None:
    def check() -> None:
        grad = full_grads([(64, 33)])[0].bfloat16()
        param = distributed(grad, init_device_mesh("cpu", (4,)), Shard(0))
        norm = clip_grad_norm_([param], 1e9)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, grad.float().norm(), rtol=1e-6, atol=0.0)

    on_four_ranks(check)


def test_float64_gradients_are_measured_in_float64() -> None:
    def check() -> None:
        grad = full_grads([(6, 5)])[0].double()
        param = distributed(grad, init_device_mesh("cpu", (4,)), Shard(0))
        torch.testing.assert_close(clip_grad_norm_(param, 1e9), grad.norm(), rtol=1e-14, atol=0.0)

    on_four_ranks(check)


# ---------------------------------------------------------------- collectives


def test_one_all_reduce_an_axis_however_many_parameters() -> None:
    def check() -> None:
        mesh = grid("dp", "tp")
        grads = full_grads([(8, 8)] * 9)
        layouts = ((Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate()))
        params = [distributed(grad, mesh, *layouts[i % 3]) for i, grad in enumerate(grads)]
        with CommDebugMode() as comms:
            clip_grad_norm_(params, MAX_NORM)
        assert comms.get_total_counts() == 2

    on_four_ranks(check)


def test_replicated_and_plain_parameters_send_nothing() -> None:
    def check() -> None:
        grads = full_grads([(3, 2), (4,)])
        replicated = distributed(grads[0], init_device_mesh("cpu", (4,)), Replicate())
        with CommDebugMode() as comms:
            clip_grad_norm_([replicated, with_grad(grads[1])], MAX_NORM)
        assert comms.get_total_counts() == 0

    on_four_ranks(check)


# ---------------------------------------------------------------- what is not finite, and mistakes


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad_rank", [0, 3])
def test_a_nan_on_one_rank_is_seen_by_all(norm_type: float, bad_rank: int) -> None:
    def check() -> None:
        grad = torch.ones(4)
        grad[bad_rank] = math.nan
        param = distributed(grad, init_device_mesh("cpu", (4,)), Shard(0))
        assert clip_grad_norm_([param], MAX_NORM, norm_type).isnan()

    on_four_ranks(check)


def test_a_norm_that_is_not_finite_raises_on_all_ranks_and_scales_nothing() -> None:
    def check(rank: int, world_size: int) -> None:
        param = distributed(torch.tensor([1.0, 2.0, math.inf, 4.0]), init_device_mesh("cpu", (4,)), Shard(0))
        try:
            clip_grad_norm_([param], MAX_NORM, error_if_nonfinite=True)
        finally:
            assert param.grad.full_tensor()[1] == 2.0

    errors_on_all_ranks(
        check, 4, RuntimeError, "the 2.0-norm of the gradients is inf", "error_if_nonfinite=False"
    )


@pytest.mark.parametrize("norm_type", [0.0, -math.inf, math.nan])
def test_a_norm_type_that_is_not_positive_is_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match=r"expected a positive norm_type, got .*Pass 2.0 or math.inf"):
        clip_grad_norm_([with_grad(torch.ones(1))], MAX_NORM, norm_type)


def test_one_tensor_a_generator_and_nothing_are_taken_too() -> None:
    param = with_grad(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(param, 10.0) == 5.0
    assert clip_grad_norm_((p for p in [param]), 1.0) == 5.0
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))
    assert clip_grad_norm_([], 1.0) == 0.0
