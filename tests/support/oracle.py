"""What a sharded model must compute: the same model unsharded, one rank's batch after the other.

    rank r:  params cast to param_dtype -> loss of r's batch -> gradients cast to reduce_dtype
    then:    (g_0 + g_1 + ... in rank order) / world_size, in reduce_dtype, cast back to the parameters' dtype

Two summands have one order, so at two ranks a sharded run must agree to the bit. At more, a collective may
add in another order, and 1e-6 of the largest gradient is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardkit import clip_grad_norm_


def oracle_grads(
    model: nn.Module,
    loss_of_rank: Callable[[nn.Module, int], Tensor],
    world_size: int,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The averaged gradients by parameter name, in each parameter's own dtype; `model` is left as it was.

    Args:
        model: unsharded; its floating-point inputs are cast to `param_dtype` on entry, as by a root unit.
        loss_of_rank: the scalar loss of `model` on rank r's batch.
        param_dtype: what parameters are computed in; None keeps their own.
        reduce_dtype: what gradients are added and divided in; None is the dtype they were computed in.

    Returns:
        The gradients of the parameters that some rank used; a parameter that none used is absent.
    """
    grads: dict[str, list[Tensor | None]] = {}
    for rank in range(world_size):
        computed = copy.deepcopy(model)
        if param_dtype is not None:
            _compute_in(computed, param_dtype)
        loss_of_rank(computed, rank).backward()
        for name, param in computed.named_parameters():
            grads.setdefault(name, []).append(param.grad)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    return {
        name: _average(of_ranks, reduce_dtype).to(dtypes[name])
        for name, of_ranks in grads.items()
        if any(grad is not None for grad in of_ranks)
    }


def assert_grads_equal(sharded_model: nn.Module, grads: dict[str, Tensor], world_size: int) -> None:
    """Every gradient of `sharded_model`, gathered, is that of `grads`: to the bit at two ranks, else nearly.

    Collective over the parameters' mesh: all ranks must call.
    """
    gathered = {
        name: param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        for name, param in sharded_model.named_parameters()
    }
    assert grads.keys() <= gathered.keys(), f"not parameters: {sorted(grads.keys() - gathered.keys())}"
    for name, grad in gathered.items():
        expected = grads.get(name)
        if grad is None or expected is None:
            assert grad is expected, f"{name}: gradient is {_told(grad)}, expected {_told(expected)}"
            continue
        assert grad.shape == expected.shape, f"{name}: shape {grad.shape}, expected {expected.shape}"
        assert grad.dtype == expected.dtype, f"{name}: dtype {grad.dtype}, expected {expected.dtype}"
        allowed = 0.0 if world_size <= 2 else 1e-6 * _largest(expected)
        difference = _largest(grad - expected)
        assert difference <= allowed, f"{name}: off by {difference:.3e}, allowed {allowed:.3e}"


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters (buffers keep their dtype) and, on entry, floating-point inputs."""
    for param in model.parameters():
        param.data = param.data.to(dtype)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model.register_forward_pre_hook(
        lambda _, args, kwargs: tree_map_only(Tensor, cast, (args, kwargs)), with_kwargs=True
    )


def _average(of_ranks: list[Tensor | None], reduce_dtype: torch.dtype | None) -> Tensor:
    used = [grad for grad in of_ranks if grad is not None]
    total = torch.zeros_like(used[0], dtype=reduce_dtype)
    for grad in used:
        total += grad.to(total.dtype)
    return total / len(of_ranks)


def _largest(tensor: Tensor) -> float:
    """The greatest magnitude; nan where there is one, which no comparison allows."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _told(grad: Tensor | None) -> str:
    return "None" if grad is None else "a tensor"


def train_clipped(
    model: nn.Module,
    optimizer: Optimizer,
    whole: nn.Module,
    reference: Optimizer,
    *,
    num_steps: int,
    batch_shape: tuple[int, int],
) -> None:
    """Train a sharded model and a whole one alike, two micro-batches a step, clipped hard."""
    for step in range(num_steps):
        for micro in range(2):
            x = torch.randn(batch_shape, generator=torch.Generator().manual_seed(10 * step + micro))
            for net in (whole, model):
                net(x).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.01)
        nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
