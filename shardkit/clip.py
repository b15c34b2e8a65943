"""Clip gradients by their global norm, however each parameter lies on whichever mesh.

Beside the data flow: takes parameters with their gradients, changes the gradients in place, gives the norm.
The norm of a model is put together from sums, so that no gradient has to move:

    on this rank      |g|^p added over the local shards of all parameters that are cut over the same axes
    between ranks     these sums added over each axis that cuts, in one all-reduce an axis for all of them
    over the model    the results added; what is replicated over an axis was added once

The infinity norm takes maxima in the place of sums. A gradient that is still `Partial` is first reduced in a
copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardkit._torch import foreach_mul_, foreach_norm
from shardkit.collectives import all_reduce_now
from shardkit.mesh import device_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients in place by min(1, max_norm / their common norm), as torch.nn.utils does.

    Takes any mix: parameters cut over different meshes or several axes of one, replicated parameters, plain
    tensors (taken to be equal on the ranks that hold them), empty shards, gradients that are offloaded.

    Collective over every axis that cuts a parameter: all ranks of these axes must call, with the same
    parameters in the same order. What is sent follows from the layouts alone, so a gradient may be None on
    some ranks only and then counts as zero there; only a `Partial` one must exist on all ranks or on none.

    Args:
        parameters: those whose `.grad` is clipped; the ones without a gradient stay as they are.
        max_norm: the largest norm that stays unscaled.
        norm_type: p of the p-norm, positive; `math.inf` for the largest magnitude.
        error_if_nonfinite: raise, on all ranks, where the norm is infinite or nan, and scale nothing.
        foreach: False handles one gradient at a time; the default and True all of them in one call.

    Returns:
        The norm before scaling, equal on all ranks: a plain tensor of shape (), float32, or float64 if a
        parameter is.

    Raises:
        ValueError: `norm_type` is not positive.
        RuntimeError: `error_if_nonfinite` is set and the norm is not finite.
        CollectiveTimeoutError: a rank died or did not call.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_: expected a positive norm_type, got {norm_type}. Pass 2.0 or math.inf."
        )
    one_by_one = foreach is False
    total_norm = _total_norm(params, norm_type, one_by_one)
    if error_if_nonfinite and not total_norm.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the {norm_type}-norm of the gradients is {total_norm.item()}. Skip this step, "
            "or pass error_if_nonfinite=False to scale by it anyway."
        )
    _scale(params, (max_norm / (total_norm + 1e-6)).clamp(max=1.0), one_by_one)
    return total_norm


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which groups hold different parts of a tensor, and the device on which they communicate."""

    device: torch.device
    groups: tuple[dist.ProcessGroup, ...] = ()


def _cut_of(tensor: Tensor) -> _Cut:
    """Any placement but these two cuts, whatever its class: Shard, torch's _StridedShard, RaggedShard."""
    if not isinstance(tensor, DTensor):
        return _Cut(tensor.device)
    mesh = tensor.device_mesh
    dims = (dim for dim, p in enumerate(tensor.placements) if not isinstance(p, Replicate | Partial))
    return _Cut(device_of(mesh), tuple(mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1))


def _total_norm(params: Sequence[Tensor], norm_type: float, one_by_one: bool) -> Tensor:
    dtype = torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32
    shards: dict[_Cut, list[Tensor]] = {}
    for param in params:
        grad = param if param.grad is None else _without_partial(param.grad)
        of_cut = shards.setdefault(_cut_of(grad), [])
        if param.grad is not None:
            of_cut.append(_local(grad))
    if not shards:
        return torch.zeros((), dtype=dtype)
    sums = {cut: _local_sum(cut, of_cut, norm_type, dtype, one_by_one) for cut, of_cut in shards.items()}
    _reduce_over_axes(sums, norm_type)
    first, *others = sums.values()
    total = torch.stack([first, *(other.to(first.device) for other in others)])  # (cuts,)
    return total.max() if math.isinf(norm_type) else total.sum() ** (1 / norm_type)


def _without_partial(grad: Tensor) -> Tensor:
    """`grad` itself, or a copy in which what was still to be added up over an axis is."""
    if not isinstance(grad, DTensor) or not any(isinstance(p, Partial) for p in grad.placements):
        return grad
    placements = [Replicate() if isinstance(p, Partial) else p for p in grad.placements]
    return grad.redistribute(placements=placements)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_sum(
    cut: _Cut, shards: Sequence[Tensor], norm_type: float, dtype: torch.dtype, one_by_one: bool
) -> Tensor:
    """This rank's sum of |g|^p, or its largest |g|, on the device of the cut."""
    filled = [shard for shard in shards if shard.numel()]  # an empty tensor has no infinity norm
    if one_by_one:
        norms = [torch.linalg.vector_norm(shard, norm_type, dtype=dtype) for shard in filled]
    else:
        norms = foreach_norm(filled, norm_type, dtype) if filled else []
    if not norms:
        return torch.zeros((), dtype=dtype, device=cut.device)
    stacked = torch.stack([norm.to(cut.device) for norm in norms])  # (filled,)
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _reduce_over_axes(sums: dict[_Cut, Tensor], norm_type: float) -> None:
    """Add up each sum over the axes of its cut: one all-reduce a group, in order of first occurrence."""
    for group in dict.fromkeys(group for cut in sums for group in cut.groups):
        cuts = [cut for cut in sums if group in cut.groups]
        packed = torch.stack([sums[cut] for cut in cuts])  # (cuts,)
        if math.isinf(norm_type):
            _all_reduce_max(packed, group)
        else:
            all_reduce_now(packed, group, "clip_grad_norm_")
        sums.update(zip(cuts, packed, strict=True))


def _all_reduce_max(values: Tensor, group: dist.ProcessGroup) -> None:
    """The maximum in place, nan where any rank has one: gloo's own keeps a nan or loses it by rank order."""
    isnan = values.isnan()
    packed = torch.cat([values.nan_to_num(nan=0.0, posinf=math.inf), isnan.to(values.dtype)])
    all_reduce_now(packed, group, "clip_grad_norm_", dist.ReduceOp.MAX)
    largest, isnan = packed.chunk(2)
    values.copy_(largest.masked_fill(isnan > 0, math.nan))


def _scale(params: Sequence[Tensor], factor: Tensor, one_by_one: bool) -> None:
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            local_grad = _local(param.grad)
            by_device.setdefault(local_grad.device, []).append(local_grad)
    for device, grads in by_device.items():
        for batch in [[grad] for grad in grads] if one_by_one else [grads]:
            foreach_mul_(batch, factor.to(device))
