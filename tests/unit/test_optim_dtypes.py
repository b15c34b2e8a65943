"""Gradients in another dtype than their parameter, as `param.grad_dtype` allows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardkit.optim import SOAP, AdamW, AdamW8bit, Muon, Shampoo

Make = Callable[..., torch.optim.Optimizer]
HALF, FULL = torch.bfloat16, torch.float32
SHAPE = (24, 40)
EightBit = partial(AdamW8bit, min_numel=1)


def param_of(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> nn.Parameter:
    param = nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype))
    param.grad_dtype = grad_dtype
    return param


def train(param: Tensor, optimizer: torch.optim.Optimizer, grad_dtype: torch.dtype) -> None:
    for step in (1, 2, 3):
        grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        param.grad = grad.to(HALF).to(grad_dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_muon_keeps_momentum_in_the_dtype_of_gradients_as_torch_does(dtype: torch.dtype) -> None:
    grad_dtype = FULL if dtype == HALF else HALF
    param, twin = (param_of(dtype, grad_dtype) for _ in range(2))
    ours = Muon([param], lr=0.02)
    oracle = torch.optim.Muon([twin], lr=0.02, adjust_lr_fn="match_rms_adamw")
    train(param, ours, grad_dtype)
    train(twin, oracle, grad_dtype)
    momenta = [optimizer.state[p]["momentum_buffer"] for optimizer, p in ((ours, param), (oracle, twin))]
    assert [momentum.dtype for momentum in momenta] == [grad_dtype, grad_dtype]
    assert torch.equal(*momenta)
    atol = 0.0 if dtype == FULL else 2.0**-7  # an ulp of a bfloat16 parameter, which is stepped in place
    torch.testing.assert_close(param, twin, rtol=0, atol=atol)


@pytest.mark.parametrize("make", [AdamW, Muon, EightBit, Shampoo, SOAP])
def test_bfloat16_gradients_of_float32_parameters_are_stepped_as_float32(make: Make) -> None:
    param, twin = param_of(FULL, None), param_of(FULL, None)
    train(param, make([param], lr=0.01), HALF)
    train(twin, make([twin], lr=0.01), FULL)
    assert torch.equal(param, twin)


@pytest.mark.parametrize("make", [EightBit, Shampoo, SOAP])
def test_what_computes_in_float32_takes_float32_gradients_of_bfloat16_parameters(make: Make) -> None:
    param, twin = param_of(HALF, None), param_of(HALF, None)
    train(param, make([param], lr=0.01), FULL)
    train(twin, make([twin], lr=0.01), HALF)
    assert torch.equal(param, twin)


@pytest.mark.parametrize("make", [AdamW, Muon])
def test_gradients_that_state_would_round_are_refused_by_name_before_anything_steps(make: Make) -> None:
    first, param = param_of(HALF, HALF), param_of(HALF, None)
    optimizer = make([("first", first), ("w", param)], lr=0.01)
    before = [value.clone() for value in (first, param, *optimizer.state[first].values())]
    first.grad = torch.ones(SHAPE, dtype=HALF)
    param.grad = torch.ones(SHAPE)
    words = r"param 'w': it is torch\.bfloat16 and its gradient torch\.float32, which its state would round"
    with pytest.raises(TypeError, match=words):
        optimizer.step()
    assert all(map(torch.equal, before, (first, param, *optimizer.state[first].values())))
