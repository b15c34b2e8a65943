"""Training on one NCCL rank equals training the unsharded model.

One rank holds everything and sends nothing, but all else happens: streams, events, casts, copies, offload.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit import Blocks, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.gpu.one_gpu import needs_gpu, run_on_gpu
from tests.support.models import Transformer
from tests.support.oracle import oracle_grads

pytestmark = needs_gpu

VOCAB, NUM_STEPS, LR = 64, 3, 0.5
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STRATEGIES: dict[str, dict[str, object]] = {
    "full": {"reshard_after_forward": True},
    "no-reshard": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=True)},
    "ragged": {"shard_placement_fn": lambda param: Blocks(4)},
}


def build() -> Transformer:
    torch.manual_seed(1)
    return Transformer(vocab=VOCAB, dim=64).cuda()


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(VOCAB, (4, 33), generator=torch.Generator().manual_seed(step)).cuda()
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def reference(precision: MixedPrecisionPolicy) -> dict[str, Tensor]:
    """The parameters after all steps, unsharded."""
    model = build()
    dtypes = {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
    for step in range(NUM_STEPS):
        grads = oracle_grads(model, lambda m, rank, step=step: loss_of(m, step), 1, **dtypes)
        with torch.no_grad():
            for name, grad in grads.items():
                model.get_parameter(name).sub_(grad, alpha=LR)
    return {name: param.detach() for name, param in model.named_parameters()}


def whole(param: nn.Parameter) -> Tensor:
    """The one shard of a parameter, on the GPU, in the parameter's shape."""
    assert isinstance(param, DTensor)
    return param.detach().to_local().reshape(param.shape).cuda()


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], part_of_largest: float) -> None:
    """Kernels may be chosen by alignment, which packing changes, so sums may run in another order."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        allowed = part_of_largest * tensor.abs().max().item()
        torch.testing.assert_close(actual[name], tensor, rtol=0.0, atol=allowed, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trained_parameters_are_those_of_the_unsharded_model(strategy: str) -> None:
    if strategy == "ragged" and torch.__version__ < (2, 12):
        pytest.skip("ragged layouts need a torch that lets a DTensor subclass dispatch")
    options = STRATEGIES[strategy]

    def body() -> None:
        model, mesh = build(), init_device_mesh("cuda", (1,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(NUM_STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if strategy == "offload":
            assert all(
                param.to_local().is_cpu and param.to_local().is_pinned() for param in model.parameters()
            )
        trained = {name: whole(param) for name, param in model.named_parameters()}
        precision = BF16 if strategy == "bf16" else MixedPrecisionPolicy()
        assert_close(trained, reference(precision), 1e-2 if strategy == "bf16" else 1e-5)

    run_on_gpu(body)


def test_a_forward_without_grad_and_a_step_are_seen_by_the_next_forward() -> None:
    def body() -> None:
        model, mesh = build(), init_device_mesh("cuda", (1,))
        twin = copy.deepcopy(model)
        for module in (*model.blocks, model):
            fully_shard(module, mesh, reshard_after_forward=False)
        with torch.no_grad():
            for step in range(2):
                torch.testing.assert_close(loss_of(model, step), loss_of(twin, step))
                for net in (model, twin):
                    for param in net.parameters():
                        param.mul_(0.5)

    run_on_gpu(body)
