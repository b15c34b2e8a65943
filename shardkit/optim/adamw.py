"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) on local tensors; elementwise, so nothing travels.

torch's own spends most of a step on small sharded parameters in calls, some ten a parameter. Here small ones
are packed into one flat tensor, stepped there, and copied back; large ones are stepped in one list. Every
element sees the same operations as in torch.optim.AdamW, so the numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardkit._torch import join_flat, split_flat
from shardkit.optim.algorithm import Group, Target
from shardkit.optim.pieces import Piece
from shardkit.optim.placed import Placed

DEFAULTS: Mapping[str, object] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "amsgrad": False,
    "maximize": False,
    "fused": False,
}
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # the last with amsgrad alone
SMALL_NUMEL = 1 << 16  # what is copied to save calls; beyond it a call is cheaper than a copy


class AdamWAlgorithm:
    """AdamW's answers to the optimizer; elementwise."""

    def __init__(self) -> None:
        self.defaults = DEFAULTS
        self.state_settings: Sequence[str] = ("amsgrad",)
        self.plan_settings: Sequence[str] = ()
        self.adds_grads_to: str | None = "exp_avg"

    def check_group(self, group: Group) -> None:
        """Raise ValueError for a setting out of range."""
        if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {group['betas']}.")

    def init_state(
        self, at: Placed, param: Tensor, group: Group, pieces: Sequence[Piece]
    ) -> dict[str, Tensor]:
        """torch.optim.AdamW's: `step`, a float32 number, and two or three tensors like the parameter."""
        step_device = param.device if group["fused"] else torch.device("cpu")
        moments = MOMENTS if group["amsgrad"] else MOMENTS[:2]
        return {
            "step": torch.zeros((), dtype=torch.float32, device=step_device),
            **{moment: torch.zeros_like(param) for moment in moments},
        }

    def begin(self, targets: Sequence[Target]) -> None:
        """The whole step."""
        alike: dict[object, list[Target]] = {}
        for target in targets:
            key = (id(target.group), target.param.dtype, target.param.device)
            alike.setdefault(key, []).append(target)
        for of_group in alike.values():
            group = of_group[0].group
            torch._foreach_add_([target.state["step"] for target in of_group], 1.0)
            if group["fused"]:
                _step_fused(of_group, group)
                continue
            by_step: dict[float, list[Target]] = {}
            for target in of_group:
                by_step.setdefault(target.state["step"].item(), []).append(target)
            for step, of_step in by_step.items():
                small = [target for target in of_step if 0 < target.param.numel() <= SMALL_NUMEL]
                large = [target for target in of_step if target.param.numel() > SMALL_NUMEL]
                _step_packed(small, group, step)
                _step_lists(_lists(large, group), group, step)


class Lists(NamedTuple):
    """The tensors of several parameters, place by place."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]  # empty without amsgrad


def _lists(targets: Sequence[Target], group: Group) -> Lists:
    moments = [[target.state[moment] for target in targets] for moment in MOMENTS[: 2 + group["amsgrad"]]]
    none: list[list[Tensor]] = [] if group["amsgrad"] else [[]]
    return Lists([target.param for target in targets], [target.grad for target in targets], *moments, *none)


def _step_packed(targets: Sequence[Target], group: Group, step: float) -> None:
    """Step one flat tensor in the place of many small ones."""
    lists = _lists(targets, group)
    if len(targets) < 2:
        _step_lists(lists, group, step)
        return
    flat = Lists(*([join_flat(tensors)] if tensors else [] for tensors in lists))
    _step_lists(flat, group, step)
    for place in (0, 2, 3, 4):  # all but the gradients
        for stepped in flat[place]:
            torch._foreach_copy_(lists[place], split_flat(stepped, lists[place]))


def _step_lists(lists: Lists, group: Group, step: float) -> None:
    """The equations, in torch.optim.AdamW's order of operations."""
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = lists
    if not params:
        return
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    if group["amsgrad"]:
        torch._foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs)
        exp_avg_sqs = max_exp_avg_sqs
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr / (1 - beta1**step))


def _step_fused(targets: Sequence[Target], group: Group) -> None:
    """torch's kernel, which on a CPU rounds the end of a tensor otherwise than its body."""
    filled = [target for target in targets if target.param.numel()]
    if not filled:
        return
    torch._fused_adamw_(
        *_lists(filled, group),
        [target.state["step"] for target in filled],
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=False,
    )
