"""Inverse roots against float64 eigenvalues, and what they do where rounding or convergence fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardkit.optim.roots import (
    eigen_of,
    inverse_root_eigh,
    inverse_root_newton,
    inverse_root_of_vectors,
    refined_eigenvectors,
)

Solve = Callable[[Tensor, int, float], Tensor]


def positive(condition: float, batch: int = 3, size: int = 24) -> Tensor:
    """Symmetric matrices with eigenvalues from 1 down to 1 / condition."""
    basis = torch.linalg.qr(torch.randn(batch, size, size, generator=torch.Generator().manual_seed(0)))[
        0
    ].double()
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), size, dtype=torch.float64)
    return (basis * values) @ basis.mT


@pytest.mark.parametrize("root", [1, 2, 4])
@pytest.mark.parametrize("solve", [inverse_root_eigh, inverse_root_newton])
def test_the_root_taken_p_times_inverts_the_matrix(solve: Solve, root: int) -> None:
    exact = positive(100.0)
    found = solve(exact.float(), root, 1e-6)
    values, vectors = torch.linalg.eigh(exact)
    mean = exact.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    expected = (vectors * (values + 1e-6 * mean).pow(-1 / root).unsqueeze(-2)) @ vectors.mT
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_products_that_do_not_converge_give_way_to_eigenvectors() -> None:
    matrices = positive(100.0).float()
    found = inverse_root_newton(matrices, 4, 1e-6, max_iterations=1)
    assert torch.equal(found, inverse_root_eigh(matrices, 4, 1e-6))


def test_a_matrix_of_zeros_has_a_finite_root() -> None:
    for solve in (inverse_root_eigh, inverse_root_newton):
        assert solve(torch.zeros(2, 3, 3), 4, 1e-4).isfinite().all()


def test_tiny_matrices_lose_nothing() -> None:
    """2^-80 is what a gradient of 2^-40 makes; squares of it are zero in float32."""
    matrices = positive(100.0).float()
    for solve in (inverse_root_eigh, inverse_root_newton):
        tiny = solve(matrices * 2.0**-80, 4, 1e-8)
        torch.testing.assert_close(tiny * 2.0**-20, solve(matrices, 4, 1e-8), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solve", [inverse_root_eigh, inverse_root_newton])
def test_one_matrix_does_not_know_of_the_others(solve: Solve) -> None:
    matrices = torch.cat((positive(10.0), positive(1000.0))).float()
    together = solve(matrices, 4, 1e-6)
    alone = torch.stack([solve(matrix, 4, 1e-6) for matrix in matrices])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_float64_is_tried_where_float32_finds_no_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices, stock = positive(100.0).float(), torch.linalg.eigh

    def only_float64(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("no convergence")
        return stock(matrix)

    expected = inverse_root_eigh(matrices, 4, 1e-6)
    monkeypatch.setattr(torch.linalg, "eigh", only_float64)
    found = inverse_root_eigh(matrices, 4, 1e-6)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_repeated_refinement_finds_the_eigenvectors_in_order_and_keeps_signs() -> None:
    matrices = positive(1e4, size=5)
    exact = eigen_of(matrices)
    assert (exact.values.diff() < 0).all()
    turned = torch.linalg.qr(exact.vectors + 0.05 * torch.ones_like(exact.vectors))[0]
    turned = turned * torch.where((turned * exact.vectors).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    turned = turned[..., [1, 0, 2, 4, 3]]
    first = refined_eigenvectors(matrices, turned)
    assert first.order.tolist() == [[1, 0, 2, 4, 3]] * 3
    turned = first.vectors
    for _ in range(20):
        turned = refined_eigenvectors(matrices, turned).vectors
    torch.testing.assert_close(turned, exact.vectors, rtol=0, atol=1e-6)


def test_eigenvectors_give_the_root_that_eigenvalues_give() -> None:
    matrices = positive(100.0).float()
    found = inverse_root_of_vectors(matrices, eigen_of(matrices).vectors, 4, 1e-6)
    torch.testing.assert_close(found, inverse_root_eigh(matrices, 4, 1e-6), rtol=1e-4, atol=1e-4)


def test_numbers_that_are_not_finite_give_nan_and_raise_on_no_rank_alone() -> None:
    matrices = positive(100.0).float()
    matrices[1, 0, 0] = torch.inf
    for solve in (inverse_root_eigh, inverse_root_newton):
        found = solve(matrices, 4, 1e-6)
        assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
