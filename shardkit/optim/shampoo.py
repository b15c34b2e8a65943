"""Shampoo by blocks (Gupta et al., 2018, algorithm 1; Anil et al., 2021, for blocks, grafting and schedule).

For every block W (rows, cols) with gradient G in its step t, on the rank that owns it:

    M <- b1 M + (1 - b1) G          L <- b2 L + (1 - b2) G G^T          R <- b2 R + (1 - b2) G^T G
    P = L'^(-1/4) M' R'^(-1/4)      primes: divided by 1 - b1^t or 1 - b2^t, what their weights sum to
    D = M' / (sqrt(V') + graft_eps) grafting: V <- b2 V + (1 - b2) G^2, and P takes the norm of D
    W <- (1 - lr wd) W - lr P       where the parameter lies

With b2 = 1 the sums have no weights, as in the first paper. Roots are renewed every `update_every` steps,
each block in a step of its own, so that no step does all; until its first root a block steps along D.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from shardkit.optim.algorithm import Group
from shardkit.optim.block_algorithm import Moment, Sizes
from shardkit.optim.roots import (
    eigen_of,
    inverse_root_eigh,
    inverse_root_newton,
    inverse_root_of_vectors,
    refined_eigenvectors,
)

Graft = Literal["adam", "rmsprop", "sgd"] | None
RootName = Literal["eigh", "qr", "newton"]

ROOT = 4  # a matrix has two sides, each with half of the inverse square root
ROOT_FLOPS = {"eigh": 11.0, "qr": 9.0, "newton": 160.0}  # times n^3; newton with 20 iterations
SIDES = ("left", "right")
DEFAULTS: Mapping[str, object] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-12,
    "weight_decay": 1e-2,
    "block": 1024,
    "update_every": 50,
    "start": None,
    "graft": "adam",
    "graft_eps": 1e-8,
    "root": "eigh",
    "maximize": False,
    "flatten": None,
}


class ShampooRule:
    """Shampoo's equations, as a `BlockRule`."""

    defaults = DEFAULTS
    state_settings: Sequence[str] = ("block", "flatten", "root", "graft")

    def check_group(self, group: Group) -> None:
        """Raise ValueError for a setting out of range."""
        beta1, beta2 = group["betas"]
        if not (0.0 <= beta1 < 1.0 and 0.0 < beta2 <= 1.0):
            raise ValueError(f"betas: expected numbers in [0, 1) and (0, 1], got {group['betas']}.")
        if group["start"] is not None and group["start"] < 1:
            raise ValueError(f"start: expected a step of at least 1, or None, got {group['start']}.")
        if group["graft"] not in ("adam", "rmsprop", "sgd", None):
            raise ValueError(f"graft: expected 'adam', 'rmsprop', 'sgd' or None, got {group['graft']!r}.")
        if group["root"] not in ROOT_FLOPS:
            raise ValueError(f"root: expected one of {tuple(ROOT_FLOPS)}, got {group['root']!r}.")

    def sizes(self, rows: int, cols: int, group: Group) -> Sizes:
        """Momentum, both sides with their roots, and what grafting and QR add."""
        found = {"exp_avg": (rows, cols)}
        for side, n in zip(SIDES, (rows, cols), strict=True):
            found |= {side: (n, n), f"{side}_root": (n, n)}
            if group["root"] == "qr":
                found[f"{side}_vectors"] = (n, n)
        if group["graft"] in ("adam", "rmsprop"):
            found["exp_avg_sq"] = (rows, cols)
        return found

    def flops(self, rows: int, cols: int, group: Group) -> float:
        """Four products in every step, and the roots."""
        roots: float = ROOT_FLOPS[group["root"]] * (float(rows) ** 3 + float(cols) ** 3)
        period: int = group["update_every"]
        return 4.0 * rows * cols * (rows + cols) + roots / period

    def moment(self, step: int, number: int, group: Group) -> Moment:
        """From `start` on, or the step `update_every`, block i renews its roots in every i-th of a period."""
        period: int = group["update_every"]
        start = period if group["start"] is None else group["start"]
        since = step - start - number % period  # steps since its first turn
        return Moment(step, step == 1, since >= 0 and since % period == 0)

    def step_blocks(self, grad: Tensor, state: dict[str, Tensor], group: Group, moment: Moment) -> Tensor:
        """The equations above."""
        beta2: float = group["betas"][1]
        _accumulate(state["left"], grad @ grad.mT, beta2)
        _accumulate(state["right"], grad.mT @ grad, beta2)
        grafted = graft_direction(grad, state, group, moment.step)
        if moment.refreshes:
            for side in SIDES:
                _renew_root(state, side, group, moment)
        rooted = _is_set(state["left_root"])  # whatever the schedule was when the state was saved
        momentum = _momentum(state, group, moment.step)
        direction: Tensor = state["left_root"] @ momentum @ state["right_root"]
        if group["graft"] is not None:
            norms = [torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (grafted, direction)]
            direction.mul_(norms[0] / (norms[1] + 1e-16))
        return torch.where(rooted, direction, grafted)

    def moves(self, step: int) -> bool:
        """Always."""
        return True

    def vector_direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Group, step: int) -> Tensor:
        """The one that blocks are grafted to."""
        return graft_direction(grad, state, group, step)


def graft_direction(grad: Tensor, state: Mapping[str, Tensor], group: Group, step: int) -> Tensor:
    """The direction of Adam, of RMSprop with momentum, or of the momentum alone; its state is updated."""
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - beta1)
    momentum = _momentum(state, group, step)
    if group["graft"] not in ("adam", "rmsprop"):
        return momentum
    _accumulate(state["exp_avg_sq"], grad.square(), beta2)
    weights: float = 1 - beta2**step if group["graft"] == "adam" and beta2 < 1 else 1.0
    root = (state["exp_avg_sq"] / weights).sqrt_()
    return momentum.div_(root.add_(group["graft_eps"]))


def _momentum(state: Mapping[str, Tensor], group: Group, step: int) -> Tensor:
    weights: float = 1 - group["betas"][0] ** step
    return state["exp_avg"] / weights


def _accumulate(mean: Tensor, value: Tensor, beta: float) -> None:
    """mean <- beta mean + (1 - beta) value, or the sum where beta is 1; in place."""
    mean.mul_(beta).add_(value, alpha=1 - beta if beta < 1 else 1.0)


def _renew_root(state: dict[str, Tensor], side: str, group: Group, moment: Moment) -> None:
    """The inverse root of one side, as the group says how."""
    beta2, eps = group["betas"][1], group["eps"]
    mean = state[side] / (1 - beta2**moment.step if beta2 < 1 else 1.0)
    if group["root"] == "newton":
        root = inverse_root_newton(mean, ROOT, eps)
    elif group["root"] == "eigh":
        root = inverse_root_eigh(mean, ROOT, eps)
    else:
        vectors = state[f"{side}_vectors"]
        vectors.copy_(_renewed_vectors(mean, vectors))
        root = inverse_root_of_vectors(mean, vectors, ROOT, eps)
    state[f"{side}_root"].copy_(root)


def _renewed_vectors(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Eigenvectors by one step of QR, or anew where there are none yet."""
    known = _is_set(vectors)
    if not bool(known.any()):
        return eigen_of(matrices).vectors
    refined = refined_eigenvectors(matrices, vectors).vectors
    return refined if bool(known.all()) else torch.where(known, refined, eigen_of(matrices).vectors)


def _is_set(state: Tensor) -> Tensor:
    """Which blocks have more than the zeros that state begins with: (.., 1, 1)."""
    return state.flatten(-2).any(-1)[..., None, None]
