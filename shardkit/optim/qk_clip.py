"""QK-clip: keep attention logits below a bound by shrinking query and key projections after a step.

Beside the algorithms. Per head h with largest logit S_h over the global batch, gamma_h = min(1, tau / S_h);
the rows of the head in the query and the key projection are multiplied by sqrt(gamma_h) (Kimi K2, 2025,
section 2.1, MuonClip). It edits the sharded parameters where they lie: nothing of them is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import spec_of
from shardkit.boxes import Layout, local_boxes
from shardkit.collectives import all_reduce_now
from shardkit.optim.placed import local
from shardkit.specs import coordinate_of, layout_of


@dataclass(frozen=True, slots=True)
class Projection:
    """A query or key projection and the logits of its heads.

    Args:
        name: for errors.
        weight: (num_heads * head_rows, in), in any layout.
        max_logits: (num_query_heads,), the largest logit of each query head on this rank. Of a grouped key
            projection several query heads share a head, and the largest of them counts.
        num_heads: heads of `weight`; divides the rows, and the number of logits.
        power: of gamma: 0.5 where query and key share the clip, 1.0 for a part that only one side has.
    """

    name: str
    weight: Tensor
    max_logits: Tensor
    num_heads: int
    power: float = 0.5


@torch.no_grad()
def qk_clip_(
    projections: Sequence[Projection], *, tau: float = 100.0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Shrink the heads whose largest logit passes `tau`, in place; call it after `optimizer.step()`.

    Collective over `group`: all ranks must call, with the same projections. One all-reduce of the maxima.
    A maximum that is not above zero, or is not finite as after an overflow, clips nothing.

    Args:
        projections: queries and keys of all layers.
        tau: the bound.
        group: ranks that saw different batches or heads; None is the default group, or one process.

    Returns:
        The maxima over all ranks, float32, those of all projections one after another.

    Raises:
        ValueError: no projection, heads that divide neither the rows nor the logits, a bound not above zero,
            or a weight that is not contiguous.
        CollectiveTimeoutError: a rank died or did not call.
    """
    if not tau > 0:
        raise ValueError(f"qk_clip_: expected tau > 0, got {tau}.")
    if not projections:
        raise ValueError("qk_clip_: expected at least one projection, got none.")
    for projection in projections:
        _check(projection)
    maxima = torch.cat([p.max_logits.detach().reshape(-1).float() for p in projections])
    maxima = torch.where(maxima.isfinite(), maxima, -torch.inf)
    group = group or dist.group.WORLD
    if group is not None:
        all_reduce_now(maxima, group, "qk_clip_", dist.ReduceOp.MAX)
    sizes = [projection.max_logits.numel() for projection in projections]
    for projection, logits in zip(projections, maxima.split(sizes), strict=True):
        by_head = logits.view(projection.num_heads, -1).amax(dim=1)  # (num_heads,)
        gamma = torch.where(by_head > tau, tau / by_head, torch.ones_like(by_head))
        _scale_rows(projection, gamma**projection.power)
    return maxima


def _scale_rows(projection: Projection, factors: Tensor) -> None:
    """Multiply each local row by the factor of its head."""
    weight, own = projection.weight, local(projection.weight)
    if isinstance(weight, DTensor):  # where others have their parts does not matter
        layout, me = layout_of(spec_of(weight)), coordinate_of(weight.device_mesh)
    else:
        layout, me = Layout(tuple(weight.shape), (), ()), ()
    by_row = factors.repeat_interleave(weight.shape[0] // projection.num_heads)  # (rows,)
    for box in local_boxes(layout, me):
        rows = by_row[box.offset[0] : box.offset[0] + box.size[0]]
        box.view(own).mul_(rows.view(-1, *(1 for _ in box.size[1:])).to(own.dtype))


def _check(projection: Projection) -> None:
    if not local(projection.weight).is_contiguous():
        raise ValueError(
            f"param {projection.name!r}: expected a contiguous tensor, got stride "
            f"{local(projection.weight).stride()}. Call .contiguous() on it before it is sharded."
        )
    num_rows, num_heads = projection.weight.shape[0], projection.num_heads
    if num_heads < 1 or num_rows % num_heads or projection.max_logits.numel() % num_heads:
        raise ValueError(
            f"param {projection.name!r}: num_heads={num_heads} do not divide its {num_rows} rows and the "
            f"{projection.max_logits.numel()} logits. Pass the heads of this projection, and one logit a "
            "query head."
        )
