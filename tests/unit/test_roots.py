"""Inverse roots against float64 eigenvalues, and what they do where rounding or convergence fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardkit.optim.roots import inverse_root_eigh, inverse_root_newton, refined_eigenvectors


def positive(condition: float, batch: int = 3, size: int = 24) -> Tensor:
    """Symmetric matrices with eigenvalues from 1 down to 1 / condition."""
    basis = torch.linalg.qr(torch.randn(batch, size, size, generator=torch.Generator().manual_seed(0)))[
        0
    ].double()
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), size, dtype=torch.float64)
    return (basis * values) @ basis.mT


@pytest.mark.parametrize("root", [1, 2, 4])
@pytest.mark.parametrize("solve", [inverse_root_eigh, inverse_root_newton])
def test_the_root_taken_p_times_inverts_the_matrix(solve, root: int) -> None:
    exact = positive(100.0)
    found = solve(exact.float(), root, 1e-6)
    values, vectors = torch.linalg.eigh(exact)
    expected = (vectors * (values + 1e-6).pow(-1 / root).unsqueeze(-2)) @ vectors.mT
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_products_that_do_not_converge_give_way_to_eigenvectors() -> None:
    matrices = positive(100.0).float()
    found = inverse_root_newton(matrices, 4, 1e-6, max_iterations=1)
    assert torch.equal(found, inverse_root_eigh(matrices, 4, 1e-6))


def test_a_matrix_of_zeros_has_the_root_of_eps() -> None:
    for solve in (inverse_root_eigh, inverse_root_newton):
        torch.testing.assert_close(solve(torch.zeros(2, 3, 3), 4, 1e-4), 10 * torch.eye(3).expand(2, 3, 3))


def test_one_matrix_does_not_know_of_the_others() -> None:
    matrices = torch.cat((positive(10.0), positive(1000.0))).float()
    together = inverse_root_newton(matrices, 4, 1e-6)
    alone = torch.cat([inverse_root_newton(matrix[None], 4, 1e-6) for matrix in matrices])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_repeated_refinement_finds_the_eigenvectors_and_keeps_signs() -> None:
    matrices = positive(1e4, size=5)
    start = torch.linalg.eigh(matrices)[1].flip(-1)  # by descending eigenvalue, as the iteration orders them
    turned = torch.linalg.qr(start + 0.05 * torch.ones_like(start))[0]
    turned = turned * torch.where((turned * start).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    for _ in range(20):
        turned = refined_eigenvectors(matrices, turned)
    torch.testing.assert_close(turned, start, rtol=0, atol=1e-6)


def test_numbers_that_are_not_finite_are_refused() -> None:
    for solve in (inverse_root_eigh, inverse_root_newton):
        with pytest.raises(ValueError, match="finite"):
            solve(torch.full((1, 2, 2), float("nan")), 4, 1e-6)
