"""Inverse p-th roots and eigenvectors of symmetric positive matrices, as Shampoo and SOAP need them.

Pure maths on whole blocks, one matrix or a batch of them; nothing is communicated. The root of A + eps m I,
with m the mean of A's diagonal, is found from eigenvectors, or by matrix products alone (Guo and Higham, "A
Schur-Newton Method for the Matrix p-th Root and its Inverse", 2006, section 6, in the coupled form of Anil et
al., "Scalable Second Order Optimization for Deep Learning", 2021, appendix C), which accelerators prefer; a
matrix for which products do not converge gets eigenvectors. Matrices are divided by m first, so that those of
tiny gradients lose nothing. A matrix that is not finite has a root of nan: what broke it is then seen in the
parameter, on all ranks, and no rank raises alone for that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ACCEPTED = 1e-4  # largest |M - I| of a root that rounding keeps from coming nearer


class Eigen(NamedTuple):
    """Eigenvalues (.., n), the largest first, and the eigenvectors in the columns of (.., n, n)."""

    values: Tensor
    vectors: Tensor


class Refined(NamedTuple):
    """Refined eigenvectors, and `order`: column i came from column order[i] of the former ones."""

    vectors: Tensor
    order: Tensor


def eigen_of(matrices: Tensor) -> Eigen:
    """Eigenvalues and eigenvectors; in float64 where float32 finds none.

    Args:
        matrices: (.., n, n), symmetric.

    Raises:
        torch.linalg.LinAlgError: no decomposition is found in float64 either.
    """
    finite = matrices.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # (.., 1, 1)
    safe = torch.where(finite, matrices, torch.zeros_like(matrices))
    try:
        values, vectors = torch.linalg.eigh(safe)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = (found.to(safe.dtype) for found in torch.linalg.eigh(safe.double()))
    vectors = torch.where(finite, vectors, torch.full_like(vectors, torch.nan))
    return Eigen(values.flip(-1), vectors.flip(-1))


def inverse_root_eigh(matrices: Tensor, root: int, eps: float) -> Tensor:
    """(A + eps m I)^(-1/root) from eigenvalues; those below zero, which rounding makes, count as zero.

    Args:
        matrices: (.., n, n) float32, symmetric and positive semi-definite.
        root: p, at least one.
        eps: added to the diagonal, in units of its mean m.
    """
    mean = _mean_diagonal(matrices)
    values, vectors = eigen_of(matrices / mean)
    return _composed(values, vectors, root, eps) * mean.pow(-1 / root)


def inverse_root_of_vectors(matrices: Tensor, vectors: Tensor, root: int, eps: float) -> Tensor:
    """(A + eps m I)^(-1/root) as if `vectors` were A's eigenvectors, with the values that they then have."""
    mean = _mean_diagonal(matrices)
    return _composed(_values_of(matrices / mean, vectors), vectors, root, eps) * mean.pow(-1 / root)


def inverse_root_newton(
    matrices: Tensor, root: int, eps: float, *, max_iterations: int = 100, tolerance: float = 1e-6
) -> Tensor:
    """(A + eps m I)^(-1/root) by the coupled Newton iteration, each matrix stopping by itself.

    With M_0 = z A, X_0 = z^(1/p) I and T = ((p + 1) I - M) / p, M <- T^p M goes to I and X <- X T to the
    root. A matrix that stops further than ACCEPTED from I is done by `inverse_root_eigh`.

    Args:
        matrices, root, eps: as `inverse_root_eigh`'s.
        max_iterations: before giving up.
        tolerance: largest |M - I| at which a matrix is left as it is.
    """
    mean = _mean_diagonal(matrices)
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    damped = matrices / mean + eps * identity
    scale = (1 + root) / (2 * torch.linalg.matrix_norm(damped, keepdim=True))  # (.., 1, 1)
    scale = torch.where(scale.isfinite(), scale, 1.0)  # of zeros without eps
    product: Tensor = damped * scale
    inverse: Tensor = identity * scale.pow(1 / root)
    error = _distance(product, identity)
    for _ in range(max_iterations):
        if bool((error <= tolerance).all()):
            break
        step = ((root + 1) * identity - product) / root
        next_product = torch.linalg.matrix_power(step, root) @ product
        next_error = _distance(next_product, identity)
        better = (error > tolerance) & (next_error < error)  # rounding stops it: keep the best
        product = torch.where(better, next_product, product)
        inverse = torch.where(better, inverse @ step, inverse)
        error = torch.where(better, next_error, error)
        if not bool(better.any()):
            break
    failed = ~(error <= max(tolerance, ACCEPTED))
    inverse = inverse * mean.pow(-1 / root)
    if bool(failed.any()):
        inverse = torch.where(failed, inverse_root_eigh(matrices, root, eps), inverse)
    return inverse


def refined_eigenvectors(matrices: Tensor, vectors: Tensor) -> Refined:
    """Eigenvectors nearer to those of matrices that moved a little: one orthogonal iteration with QR.

    Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, algorithm 4. Columns are brought
    into the order of their values first, the largest first, as the iteration orders them; the sign of each
    stays that of its predecessor.

    Args:
        matrices: (.., n, n), symmetric.
        vectors: (.., n, n), orthonormal columns, of an earlier state of the matrices.
    """
    order = _values_of(matrices, vectors).argsort(dim=-1, descending=True, stable=True)  # (.., n)
    former = torch.take_along_dim(vectors, order.unsqueeze(-2), -1)
    moved, _ = torch.linalg.qr(matrices / _mean_diagonal(matrices) @ former)
    signs = torch.where((moved * former).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    return Refined(moved * signs, order)


def _values_of(matrices: Tensor, vectors: Tensor) -> Tensor:
    """v^T A v for each column v: (.., n)."""
    values: Tensor = (vectors * (matrices @ vectors)).sum(-2)
    return values


def _composed(values: Tensor, vectors: Tensor, root: int, eps: float) -> Tensor:
    powers = (values.clamp(min=0) + eps).pow(-1 / root)  # (.., n)
    composed: Tensor = (vectors * powers.unsqueeze(-2)) @ vectors.mT
    return composed


def _mean_diagonal(matrices: Tensor) -> Tensor:
    """(.., 1, 1), above zero."""
    mean = matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return mean.clamp(min=torch.finfo(matrices.dtype).tiny)


def _distance(matrices: Tensor, identity: Tensor) -> Tensor:
    """Largest |M - I|: (.., 1, 1)."""
    return (matrices - identity).abs().amax((-2, -1), keepdim=True)
