"""Which dtype a parameter computes, travels and reduces in, and how its gradient is divided.

Level 1 of the data flow: pure. Takes torch's own `MixedPrecisionPolicy` and one parameter's dtype; gives
dtypes and a `Division`. A policy is resolved for each parameter when it is used, so a cast of the model or a
late unfreeze never leaves a stale dtype behind.

    sharded (optimizer)   gathered (compute)    gradient (reduction)    .grad
    float32           ->  param_dtype       ->  reduce_dtype        ->  float32
    uint8             ->  uint8             ->  none
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.containers import map_tensors


class Division(NamedTuple):
    """How a summed gradient becomes the mean: average in the collective, or scale before and after a sum."""

    average: bool
    before: float
    after: float


def compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype of the gathered parameter: only floating-point ones are cast."""
    return policy.param_dtype if policy.param_dtype is not None and dtype.is_floating_point else dtype


def reduce_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype in which gradients accumulate and reduce: the compute dtype unless the policy names one."""
    if policy.reduce_dtype is not None and dtype.is_floating_point:
        return policy.reduce_dtype
    return compute_dtype(dtype, policy)


@cache
def division(dtype: torch.dtype, num_ranks: int, factor: float | None, can_average: bool) -> Division:
    """How to divide a gradient that `num_ranks` ranks sum in `dtype`.

    float16 overflows at 65504, so it is divided by about the root of the divisor before the sum and by the
    rest after it. Other dtypes are averaged by the collective where it can, else divided after it, on
    1/num_ranks of the data.

    Args:
        factor: the user's divisor in place of `num_ranks`.
        can_average: the collective has a mean, and the user did not ask for sums only.
    """
    divisor = float(num_ranks if factor is None else factor)
    if dtype == torch.float16:
        before = 1.0
        while divisor % (2 * before) == 0 and divisor / before > before:
            before *= 2
        return Division(False, before, divisor / before)
    if factor is None and can_average:
        return Division(True, 1.0, 1.0)
    return Division(False, 1.0, divisor)


def cast_floating(value: object, dtype: torch.dtype) -> object:
    """`value` with its floating-point tensors in `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value)
