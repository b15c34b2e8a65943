"""Muon: momentum, then the orthogonal matrix nearest to it (Jordan et al., 2024; NorMuon, Li et al., 2025).

For every matrix W (rows, cols) with gradient G, momentum M and learning rate lr:

    M <- mu M + (1 - mu) G                       where the parameter lies; the form of torch.optim.Muon
    U <- G + mu (M - G)   or M                   nesterov, or not; in the dtype of the wire
    O <- newton_schulz(U)                        on the matrix' worker; with row_norm_beta2, rows normalised
    W <- (1 - lr wd) W - lr s(rows, cols) O      where the parameter lies

Newton and Schulz cast to bfloat16 first, so U travels in bfloat16 and nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from shardkit.boxes import Box
from shardkit.optim.algorithm import Group, Target
from shardkit.optim.blocks import Dealer
from shardkit.optim.newton_schulz import (
    Coefficients,
    TableName,
    coefficients_of,
    newton_schulz,
    newton_schulz_flops,
    normalize_rows,
)
from shardkit.optim.pieces import (
    Field,
    Matrix,
    Piece,
    Region,
    matrices_of,
    num_stack_dims,
    row_layout,
    shares_of,
)
from shardkit.optim.placed import Placed

Scale = Literal["rms_0.2", "sqrt_ratio_clamped", "sqrt_ratio", "sqrt_max"]
Orthogonalize = Callable[[Tensor], Tensor]

SCALES: Mapping[str, Callable[[int, int], float]] = {
    "rms_0.2": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),  # AdamW's size: one lr for both
    "sqrt_ratio_clamped": lambda rows, cols: math.sqrt(max(1, rows / cols)),  # torch's "original"
    "sqrt_ratio": lambda rows, cols: math.sqrt(rows / cols),
    "sqrt_max": lambda rows, cols: math.sqrt(max(rows, cols)),
}
DEFAULTS: Mapping[str, object] = {
    "lr": 1e-3,
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.1,
    "adjust_lr": "rms_0.2",
    "coefficients": "jordan",
    "ns_dtype": torch.bfloat16,
    "eps": 1e-30,
    "row_norm_beta2": None,
    "comm_dtype": None,
    "maximize": False,
    "heads": None,
    "split_rows": None,
    "flatten": None,
}


class MuonAlgorithm:
    """Muon's answers to the optimizer.

    Args:
        orthogonalize: replaces Newton and Schulz: takes and gives (batch, rows, cols).
    """

    def __init__(self, orthogonalize: Orthogonalize | None = None) -> None:
        if orthogonalize is not None and not callable(orthogonalize):
            raise TypeError(f"orthogonalize: expected a function, or None, got {orthogonalize!r}.")
        self.defaults = DEFAULTS
        self.state_settings: Sequence[str] = ("row_norm_beta2",)
        self.plan_settings: Sequence[str] = ("heads", "split_rows", "flatten", "ns_dtype", "comm_dtype")
        self.adds_grads_to: str | None = "momentum_buffer"
        self.orthogonalize = orthogonalize

    def check_group(self, group: Group) -> None:
        """Raise ValueError for a setting out of range."""
        coefficients_of(group["coefficients"])
        if not callable(group["adjust_lr"]) and group["adjust_lr"] not in SCALES:
            raise ValueError(
                f"adjust_lr: expected one of {sorted(SCALES)} or a function (rows, cols) -> float, got "
                f"{group['adjust_lr']!r}."
            )
        for name in ("momentum", "row_norm_beta2"):
            value = group[name]
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: expected a number in [0, 1), got {value}.")

    def init_state(
        self, at: Placed, param: Tensor, group: Group, pieces: Sequence[Piece]
    ) -> dict[str, Tensor]:
        """`momentum_buffer` like the gradient and, for NorMuon, `row_variance` with one number a row."""
        state = {"momentum_buffer": torch.zeros_like(param, dtype=param.grad_dtype)}
        if group["row_norm_beta2"] is not None:
            layout = row_layout(at.layout, group["flatten"])
            state["row_variance"] = at.zeros(layout, torch.float32, param.device)
        return state

    def pieces(self, at: Placed, group: Group, dealer: Dealer) -> list[Piece]:
        """One a matrix.

        Raises:
            ValueError: the parameter is no matrix, or its rows do not divide as the group says.
        """
        matrices = matrices_of(
            at.name,
            at.layout.shape,
            heads=group["heads"],
            split_rows=group["split_rows"],
            flatten=group["flatten"],
        )
        num_steps = len(coefficients_of(group["coefficients"]))
        return [
            Piece(
                at.name,
                matrix.region.label(at.layout.shape),
                matrix.rows,
                matrix.cols,
                self._fields(at, group, matrix),
                newton_schulz_flops(matrix.rows, matrix.cols, num_steps),
            )
            for matrix in matrices
            if matrix.region.numel
        ]

    def begin(self, targets: Sequence[Target]) -> None:
        """Momentum, in place."""
        by_momentum: dict[float, list[Target]] = {}
        for target in targets:
            by_momentum.setdefault(target.group["momentum"], []).append(target)
        for momentum, alike in by_momentum.items():
            buffers = [target.state["momentum_buffer"] for target in alike]
            torch._foreach_lerp_(buffers, [target.grad for target in alike], 1 - momentum)

    def read(self, target: Target, piece: Piece, field: int, box: Box) -> Tensor:
        """The matrix to orthogonalise, or its row variance."""
        if field == 1:
            return box.view(target.state["row_variance"])
        buffer = box.view(target.state["momentum_buffer"])
        if not target.group["nesterov"]:
            return buffer
        return box.view(target.grad).lerp(buffer, target.group["momentum"])

    def compute(
        self, targets: Sequence[Target], pieces: Sequence[Piece], fields: Sequence[list[Tensor]]
    ) -> list[list[Tensor]]:
        """Orthogonalise whole matrices."""
        groups = [target.group for target in targets]
        matrices = [
            whole[0].view(piece.rows, piece.cols) for piece, whole in zip(pieces, fields, strict=True)
        ]
        results = []
        orthogonal = self._orthogonal(groups, matrices)
        for group, whole, update in zip(groups, fields, orthogonal, strict=True):
            beta2 = group["row_norm_beta2"]
            if beta2 is None:
                results.append([update.reshape(whole[0].shape)])
            else:
                rows = update.shape[0]
                update, variance = normalize_rows(update, whole[1].view(rows, 1), beta2)
                results.append([update.reshape(whole[0].shape), variance.view(whole[1].shape)])
        return results

    def write(self, target: Target, piece: Piece, field: int, box: Box, values: Tensor) -> None:
        """Decay the parameter and step along the orthogonal matrix, or keep the new row variance."""
        if field == 1:
            box.view(target.state["row_variance"]).copy_(values)
            return
        group = target.group
        lr = float(group["lr"])
        adjust_lr = group["adjust_lr"]
        scale = adjust_lr if callable(adjust_lr) else SCALES[adjust_lr]
        param = box.view(target.param)
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(values, alpha=-(lr * scale(piece.rows, piece.cols)))

    def _fields(self, at: Placed, group: Group, matrix: Matrix) -> tuple[Field, ...]:
        region = matrix.region
        fields = [Field(region, self._wire_dtype(group), shares_of(at.layout, region, at.axes, at.me))]
        if group["row_norm_beta2"] is not None:
            layout = row_layout(at.layout, group["flatten"])
            row_dims = num_stack_dims(layout.shape, group["flatten"]) + 1
            ones = (1,) * (len(layout.shape) - row_dims)
            rows = Region(region.offset, (*region.size[:row_dims], *ones))
            fields.append(Field(rows, torch.float32, shares_of(layout, rows, at.axes, at.me)))
        return tuple(fields)

    def _wire_dtype(self, group: Group) -> torch.dtype:
        """bfloat16 where that is the first thing done to the matrix; a float16 one is normalised before."""
        if group["comm_dtype"] is not None:
            return group["comm_dtype"]  # type: ignore[no-any-return]
        if self.orthogonalize is not None or group["ns_dtype"] == torch.float16:
            return torch.float32
        return group["ns_dtype"]  # type: ignore[no-any-return]

    def _orthogonal(self, groups: Sequence[Group], matrices: Sequence[Tensor]) -> list[Tensor]:
        """One by one on the CPU, where a batch is no faster; elsewhere those of one shape together."""
        alike: dict[object, list[int]] = {}
        for i, (group, matrix) in enumerate(zip(groups, matrices, strict=True)):
            is_alone = matrix.device.type == "cpu" and self.orthogonalize is None
            alike.setdefault(i if is_alone else (id(group), matrix.shape), []).append(i)
        results: dict[int, Tensor] = {}
        for places in alike.values():
            group, first = groups[places[0]], matrices[places[0]]
            if first.device.type == "cpu" and self.orthogonalize is None:
                results[places[0]] = _iterate(group, first)
                continue
            stack = torch.stack([matrices[i] for i in places])  # (batch, rows, cols)
            done = _iterate(group, stack) if self.orthogonalize is None else self.orthogonalize(stack)
            results.update(zip(places, done, strict=True))
        return [results[i] for i in range(len(matrices))]


def _iterate(group: Group, matrix: Tensor) -> Tensor:
    table: TableName | Coefficients = group["coefficients"]
    return newton_schulz(matrix, coefficients_of(table), dtype=group["ns_dtype"], eps=group["eps"])
