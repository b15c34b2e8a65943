"""Newton and Schulz's iteration: from a matrix U S V^T to about U V^T, by matrix products alone.

Pure: whole matrices in, whole matrices out; no layout and no communication. The polynomial of one step is
x -> a x + b x^3 + c x^5 on the singular values (Jordan et al., 2024, "Muon"; Amsel et al., 2025, "The Polar
Express", for tables whose coefficients change from step to step). The same word means other polynomials in
other libraries, so the tables are written out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]
TableName = Literal["jordan", "youjiacheng", "polar_express"]

TABLES: dict[str, Coefficients] = {
    # torch.optim.Muon's; "simple" in emerging-optimizers. Singular values end between 0.68 and 1.13.
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    # "quintic" in Megatron. About 2 % from the polar factor.
    "youjiacheng": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # five steps with a safety factor of 1.02, as Dion has them; emerging-optimizers' table is another one
    "polar_express": (
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
}


def coefficients_of(table: TableName | Coefficients) -> Coefficients:
    """The steps of a table, by name or written out.

    Raises:
        ValueError: the name is unknown, or a step has not three coefficients.
    """
    if isinstance(table, str):
        if table not in TABLES:
            raise ValueError(
                f"coefficients: expected one of {sorted(TABLES)} or a tuple of (a, b, c), got {table!r}."
            )
        return TABLES[table]
    steps = tuple((float(a), float(b), float(c)) for a, b, c in table)
    if not steps:
        raise ValueError("coefficients: expected at least one step (a, b, c), got none.")
    return steps


def newton_schulz(
    matrix: Tensor, coefficients: Coefficients, *, dtype: torch.dtype = torch.bfloat16, eps: float = 1e-30
) -> Tensor:
    """An approximation of U V^T for `matrix` = U S V^T; `matrix` itself is never written.

    With the Jordan table and bfloat16 every operation is torch.optim.Muon's, so the result is to the bit.

    Args:
        matrix: (rows, cols) or (batch, rows, cols), any floating dtype.
        coefficients: (a, b, c) of each step.
        dtype: in which the products are computed.
        eps: the least norm that is divided by. A larger one shrinks the result for tiny gradients.

    Returns:
        The same shape, in `dtype`.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(dtype)
    x = x.mT if is_tall else x  # (.., short, long)
    norm = x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in coefficients:
        gram = x @ x.mT  # (.., short, short)
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def newton_schulz_flops(rows: int, cols: int, num_steps: int = 5) -> float:
    """Floating-point operations of `num_steps` steps on one matrix."""
    short, long = min(rows, cols), max(rows, cols)
    return float(num_steps) * (4.0 * short * short * long + 2.0 * short**3)


def normalize_rows(
    orthogonal: Tensor, row_variance: Tensor, beta2: float, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """NorMuon's second moment by row (Li et al., 2025, algorithm 1); keeps the matrix' Frobenius norm.

    Args:
        orthogonal: (rows, cols), what Newton and Schulz gave.
        row_variance: (rows, 1), float32, the running mean of the squares of each row.
        beta2: how much of the running mean stays.

    Returns:
        The rescaled matrix in the dtype of `orthogonal`, and the new (rows, 1) variance.
    """
    update = orthogonal.float()
    variance = row_variance.lerp(update.square().mean(dim=-1, keepdim=True), 1 - beta2)
    scaled = update / (variance.sqrt() + eps)
    norm, scaled_norm = update.norm(), scaled.norm()
    return (scaled * (norm / scaled_norm.clamp(min=1e-30))).to(orthogonal.dtype), variance
