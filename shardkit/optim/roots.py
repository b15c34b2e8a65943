"""Inverse p-th roots of batches of symmetric positive matrices, as Shampoo needs them.

Pure maths on whole blocks; nothing is communicated. (A + eps I)^(-1/p) is found from eigenvectors, or by
matrix products alone (Guo and Higham, "A Schur-Newton Method for the Matrix p-th Root and its Inverse", 2006,
section 6, in the coupled form of Anil et al., "Scalable Second Order Optimization for Deep Learning", 2021,
appendix C), which accelerators prefer; a matrix for which products do not converge gets eigenvectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACCEPTED = 1e-4  # largest |M - I| of a root that rounding keeps from coming nearer


def inverse_root_eigh(matrices: Tensor, root: int, eps: float) -> Tensor:
    """(A + eps I)^(-1/root) from eigenvalues; those below zero, which rounding makes, count as zero.

    Args:
        matrices: (batch, n, n) float32, symmetric and positive semi-definite.
        root: p, at least one.
        eps: added to the diagonal, in the unit of the matrices.

    Returns:
        (batch, n, n) in the dtype of `matrices`.

    Raises:
        ValueError: a number is not finite.
        torch.linalg.LinAlgError: no decomposition is found in float64 either.
    """
    _require_finite(matrices)
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(matrices.double())
    powers = (values.clamp(min=0) + eps).pow(-1 / root)  # (batch, n)
    inverse: Tensor = (vectors * powers.unsqueeze(-2)) @ vectors.mT
    return inverse.to(matrices.dtype)


def inverse_root_newton(
    matrices: Tensor, root: int, eps: float, *, max_iterations: int = 100, tolerance: float = 1e-6
) -> Tensor:
    """(A + eps I)^(-1/root) by the coupled Newton iteration, each matrix stopping by itself.

    With M_0 = z A, X_0 = z^(1/p) I and T = ((p + 1) I - M) / p, M <- T^p M goes to I and X <- X T to
    the root. A matrix that stops further than ACCEPTED from I is done by `inverse_root_eigh`.

    Args:
        matrices: (batch, n, n) float32, symmetric and positive semi-definite.
        root: p, at least one.
        eps: added to the diagonal, in the unit of the matrices.
        max_iterations: before giving up.
        tolerance: largest |M - I| at which a matrix is left as it is.

    Raises:
        ValueError: a number is not finite.
    """
    _require_finite(matrices)
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    damped = matrices + eps * identity
    norms = torch.linalg.matrix_norm(damped)[:, None, None]  # (batch, 1, 1)
    scale = (1 + root) / (2 * norms.clamp(min=torch.finfo(matrices.dtype).tiny))
    product: Tensor = damped * scale
    inverse: Tensor = identity * scale.pow(1 / root)
    error = (product - identity).abs().amax((1, 2))  # (batch,)
    for _ in range(max_iterations):
        if bool((error <= tolerance).all()):
            break
        step = ((root + 1) * identity - product) / root
        next_product = torch.linalg.matrix_power(step, root) @ product
        next_error = (next_product - identity).abs().amax((1, 2))
        goes_on = (error > tolerance) & (next_error < error)  # rounding stops it: keep the best
        better = goes_on[:, None, None]
        product = torch.where(better, next_product, product)
        inverse = torch.where(better, inverse @ step, inverse)
        error = torch.where(goes_on, next_error, error)
        if not bool(goes_on.any()):
            break
    failed = ~(error <= max(tolerance, ACCEPTED))
    if bool(failed.any()):
        inverse[failed] = inverse_root_eigh(matrices[failed], root, eps)
    return inverse


def refined_eigenvectors(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Eigenvectors nearer to those of matrices that moved a little: one orthogonal iteration with QR.

    Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, algorithm 4. The sign of each
    stays that of its predecessor, and their order is kept.

    Args:
        matrices: (batch, n, n), symmetric.
        vectors: (batch, n, n), orthonormal columns, of an earlier state of the matrices.
    """
    moved, _ = torch.linalg.qr(matrices @ vectors)
    signs: Tensor = torch.where((moved * vectors).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    turned: Tensor = moved * signs
    return turned


def _require_finite(matrices: Tensor) -> None:
    if not bool(matrices.isfinite().all()):
        raise ValueError(
            "inverse root: expected finite matrices, got inf or nan. Skip the step that made them."
        )
