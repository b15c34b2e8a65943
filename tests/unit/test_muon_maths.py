"""Muon's arithmetic on whole matrices, against references written from the equations without the package."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from shardkit.optim import Muon
from shardkit.optim.newton_schulz import TABLES, newton_schulz

GAUSSIAN = 0.0
STEEP = 1.5  # singular values k^-1.5


def matrix_of(rows: int, cols: int, decay: float, seed: int = 3) -> Tensor:
    """Gaussian, or with singular values k^-decay."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    if decay:
        u, values, v = torch.linalg.svd(matrix, full_matrices=False)
        matrix = (u * torch.arange(1, len(values) + 1, dtype=torch.float64) ** -decay) @ v
    return matrix.float()


def polynomial(matrix: Tensor, table: str) -> Tensor:
    """The steps of a table on the singular values in float64: no matrix is multiplied by another."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for a, b, c in TABLES[table]:
        values = a * values + b * values**3 + c * values**5
    return (u * values) @ v


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("shape", [(256, 896), (896, 256)], ids=["wide", "tall"])
def test_newton_schulz_is_near_its_polynomial_in_float64(table: str, shape: tuple[int, int]) -> None:
    for decay, limit in ((GAUSSIAN, 0.02), (STEEP, 0.20 if table == "polar_express" else 0.15)):
        matrix = matrix_of(*shape, decay)
        exact = polynomial(matrix, table)
        error = (newton_schulz(matrix, TABLES[table]).double() - exact).norm() / exact.norm()
        assert error < limit, decay
        in_float64 = newton_schulz(matrix.double(), TABLES[table], dtype=torch.float64)
        torch.testing.assert_close(in_float64, exact, rtol=0, atol=1e-10)


PUBLISHED = {
    "jordan": "3.4445 -4.7750 2.0315 " * 5,
    "youjiacheng": "4.0848 -6.8946 2.9270 3.9505 -6.3029 2.6377 3.7418 -5.5913 2.3037 2.8769 -3.1427 1.2046 "
    "2.8366 -3.0525 1.2012",
    "polar_express": "8.1566 -22.4833 15.8788 4.0429 -2.8089 .5000 3.8917 -2.7725 .5061 3.2858 -2.3681 .4645 "
    "2.3465 -1.7098 .4232",
}


@pytest.mark.parametrize(
    ("table", "least", "most"),
    [("jordan", 0.1, 0.17), ("youjiacheng", 0.01, 0.025), ("polar_express", 0.08, 0.11)],
)
def test_tables_are_those_published_and_as_near_to_the_polar_factor(
    table: str, least: float, most: float
) -> None:
    assert [number for step in TABLES[table] for number in step] == list(map(float, PUBLISHED[table].split()))
    matrix = matrix_of(256, 896, GAUSSIAN)
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    distance = (polynomial(matrix, table) - u @ v).norm() / (u @ v).norm()
    assert least < distance < most


def test_a_batch_gives_what_its_matrices_give() -> None:
    """To rounding only: a device may add in another order for a batch than for one matrix."""
    for shape in ((48, 96), (96, 48)):
        matrices = torch.stack([matrix_of(*shape, GAUSSIAN, seed) for seed in range(3)])
        together = newton_schulz(matrices, TABLES["jordan"]).float()
        alone = torch.stack([newton_schulz(matrix, TABLES["jordan"]).float() for matrix in matrices])
        torch.testing.assert_close(together, alone, rtol=1e-2, atol=2e-2)


def test_nothing_in_nothing_out() -> None:
    assert torch.equal(newton_schulz(torch.zeros(4, 6), TABLES["jordan"]).float(), torch.zeros(4, 6))
    param = nn.Parameter(torch.ones(4, 6))
    optimizer = Muon([param], weight_decay=0.0, row_norm_beta2=0.95)
    param.grad = torch.zeros(4, 6)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(4, 6))


def test_tiny_gradients_keep_their_direction() -> None:
    moved = []
    for factor in (1.0, 2.0**-40):  # 1e-12, and no digit of the gradient changes
        param = nn.Parameter(torch.zeros(16, 8))
        optimizer = Muon([param])
        param.grad = matrix_of(16, 8, GAUSSIAN) * factor
        optimizer.step()
        moved.append(param.detach())
    assert (moved[1] - moved[0]).norm() < 1e-3 * moved[0].norm()


def test_a_bfloat16_gradient_without_nesterov_leaves_the_momentum_whole() -> None:
    """torch's own divides in place what is its momentum buffer."""
    param = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    optimizer = Muon([param], nesterov=False)
    param.grad = torch.full((8, 4), 3.0, dtype=torch.bfloat16)
    optimizer.step()
    expected = torch.zeros(8, 4, dtype=torch.bfloat16).lerp_(param.grad, 1 - 0.95)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], expected)


MU = 0.875  # the sum is then eight times the mean that Muon keeps, and both round alike to bfloat16


def steps_of_normuon(
    weight: Tensor, grads: list[Tensor], *, nesterov: bool, dtype: torch.dtype, beta2: float = 0.95
) -> tuple[Tensor, Tensor]:
    """NorMuon as published for one process: Muon with the momentum as a sum, then each row by its own size.

    M <- mu M + G;  U <- mu M + G or M;  O <- Newton and Schulz of U / (|U| + 1e-8), the wide way around
    v <- beta2 v + (1 - beta2) mean over columns of O^2;  P <- O / (sqrt(v) + 1e-8);  P <- P |O| / |P|
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(rows, cols)) P
    """
    lr, decay = 0.02, 0.1
    momentum, variance = torch.zeros_like(weight), torch.zeros(weight.shape[0], 1)
    for grad in grads:
        momentum = MU * momentum + grad
        x = (MU * momentum + grad if nesterov else momentum).to(dtype)
        x = x.T if weight.shape[0] > weight.shape[1] else x
        x = x / (x.norm() + 1e-8)
        for _ in range(5):
            square = x @ x.T
            x = torch.addmm(
                x, torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315), x, beta=3.4445
            )
        update = (x.T if weight.shape[0] > weight.shape[1] else x).float()
        variance = beta2 * variance + (1 - beta2) * (update * update).mean(1, keepdim=True)
        by_row = update / (variance.sqrt() + 1e-8)
        by_row = by_row * (update.norm() / by_row.norm())
        weight = weight * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(weight.shape)) * by_row
    return weight, variance


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(48, 32), (24, 80)])
def test_normuon_is_that_of_the_paper(
    shape: tuple[int, int], dtype: torch.dtype, limit: float, nesterov: bool
) -> None:
    start, *grads = (matrix_of(*shape, GAUSSIAN, seed) for seed in range(5))
    grads = [grad * torch.arange(1.0, shape[0] + 1)[:, None] for grad in grads]  # rows of all sizes
    expected, variance = steps_of_normuon(start, grads, nesterov=nesterov, dtype=dtype)
    param = nn.Parameter(start.clone())
    settings = {"lr": 0.02, "momentum": MU, "ns_dtype": dtype, "nesterov": nesterov}
    optimizer = Muon([param], row_norm_beta2=0.95, **settings)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    assert (param - expected).norm() < limit * (expected - start).norm()
    assert (optimizer.state[param]["row_variance"] - variance).norm() < limit * variance.norm()
    plain = nn.Parameter(start.clone())
    muon = Muon([plain], **settings)
    for grad in grads:
        plain.grad = grad
        muon.step()
    assert (plain - expected).norm() > 0.05 * (expected - start).norm()  # the rows do matter here
