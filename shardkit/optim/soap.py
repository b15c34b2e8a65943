"""SOAP: Adam in the eigenvectors of Shampoo's two sides, by blocks (Vyas et al., 2024, algorithm 3).

For every block W (rows, cols) with gradient G, on the rank that owns it, with k the steps since the first:

    M <- b1 M + (1 - b1) G          G~ = Q_L^T G Q_R        M~ = Q_L^T M Q_R
    V <- b2 V + (1 - b2) G~^2       N = Q_L (M~' / (sqrt(V') + eps)) Q_R^T
    L <- b2 L + (1 - b2) G G^T      R <- b2 R + (1 - b2) G^T G
    Q_L, Q_R <- one step of QR      every `update_every` steps, each block in a step of its own
    W <- (1 - lr wd) W - lr N       where the parameter lies

The first step makes L, R and their eigenvectors and moves nothing. V follows its eigenvectors when these
change order. Parameters of fewer than two dims are stepped as by AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardkit.optim.algorithm import Group
from shardkit.optim.block_algorithm import Moment, Sizes
from shardkit.optim.roots import eigen_of, refined_eigenvectors
from shardkit.optim.shampoo import ROOT_FLOPS, SIDES, graft_direction

DEFAULTS: Mapping[str, object] = {
    "lr": 3e-3,
    "betas": (0.95, 0.95),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "block": 1024,
    "update_every": 10,
    "maximize": False,
    "flatten": None,
}


class SoapRule:
    """SOAP's equations, as a `BlockRule`."""

    defaults = DEFAULTS
    state_settings: Sequence[str] = ("block", "flatten")

    def check_group(self, group: Group) -> None:
        """Raise ValueError for a setting out of range."""
        if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {group['betas']}.")

    def sizes(self, rows: int, cols: int, group: Group) -> Sizes:
        """Both moments, and both sides with their eigenvectors."""
        return {
            "exp_avg": (rows, cols),
            "exp_avg_sq": (rows, cols),
            "left": (rows, rows),
            "right": (cols, cols),
            "left_vectors": (rows, rows),
            "right_vectors": (cols, cols),
        }

    def flops(self, rows: int, cols: int, group: Group) -> float:
        """Eight products in every step, and QR."""
        refining = ROOT_FLOPS["qr"] * (float(rows) ** 3 + float(cols) ** 3)
        period: int = group["update_every"]
        return 8.0 * rows * cols * (rows + cols) + refining / period

    def moment(self, step: int, number: int, group: Group) -> Moment:
        """Begin in the first step; then block i refines its vectors in every i-th step of a period."""
        period: int = group["update_every"]
        return Moment(step, step == 1, step > 1 and (step - 1 - number) % period == 0)

    def step_blocks(self, grad: Tensor, state: dict[str, Tensor], group: Group, moment: Moment) -> Tensor:
        """The equations above."""
        beta1, beta2 = group["betas"]
        num_steps = moment.step - 1
        direction = torch.zeros_like(grad)
        if not moment.begins:
            left, right = state["left_vectors"], state["right_vectors"]
            state["exp_avg"].lerp_(grad, 1 - beta1)
            turned, mean = (left.mT @ x @ right for x in (grad, state["exp_avg"]))
            state["exp_avg_sq"].lerp_(turned.square(), 1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2**num_steps)).sqrt()
            direction = left @ (mean / (1 - beta1**num_steps) / (root + group["eps"])) @ right.mT
        state["left"].lerp_(grad @ grad.mT, 1 - beta2)
        state["right"].lerp_(grad.mT @ grad, 1 - beta2)
        if moment.begins:
            for side in SIDES:
                state[f"{side}_vectors"].copy_(eigen_of(state[side]).vectors)
        elif moment.refreshes:
            _refine(state)
        return direction

    def moves(self, step: int) -> bool:
        """Not in the first step, whose gradient made the eigenvectors."""
        return step > 1

    def vector_direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Group, step: int) -> Tensor:
        """Adam's, from the first step on."""
        return graft_direction(grad, state, {**group, "graft": "adam", "graft_eps": group["eps"]}, step)


def _refine(state: dict[str, Tensor]) -> None:
    """New eigenvectors of both sides; the second moment keeps to its own."""
    rows, cols = (refined_eigenvectors(state[side], state[f"{side}_vectors"]) for side in SIDES)
    in_rows = torch.take_along_dim(state["exp_avg_sq"], rows.order.unsqueeze(-1), -2)
    state["exp_avg_sq"].copy_(torch.take_along_dim(in_rows, cols.order.unsqueeze(-2), -1))
    state["left_vectors"].copy_(rows.vectors)
    state["right_vectors"].copy_(cols.vectors)
