"""SOAP against its equations, written out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardkit.optim import SOAP, block_algorithm
from tests.parity.test_muon import give_grads, matrices
from tests.parity.test_shampoo import assert_near, by_blocks
from tests.parity.test_shampoo import trained as trained_by

SHAPES = [(40, 24), (16, 16)]
SETTINGS: Mapping[str, object] = {
    "lr": 0.02,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "block": 16,
    "update_every": 3,
}


def train_block(
    weight: Tensor, grads: Sequence[Tensor], number: int, settings: Mapping[str, object]
) -> Tensor:
    (beta1, beta2), lr = settings["betas"], settings["lr"]
    left, right = ((1 - beta2) * x for x in (grads[0] @ grads[0].T, grads[0].T @ grads[0]))
    left_basis, right_basis = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
    momentum, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads[1:], 1):
        momentum = beta1 * momentum + (1 - beta1) * grad
        turned = left_basis.T @ grad @ right_basis
        second = beta2 * second + (1 - beta2) * turned * turned
        mean = left_basis.T @ momentum @ right_basis / (1 - beta1**step)
        adam = mean / ((second / (1 - beta2**step)).sqrt() + settings["eps"])
        weight = (1 - lr * settings["weight_decay"]) * weight - lr * left_basis @ adam @ right_basis.T
        left = beta2 * left + (1 - beta2) * grad @ grad.T
        right = beta2 * right + (1 - beta2) * grad.T @ grad
        if (step - number) % settings["update_every"] == 0:
            by_rows = torch.diag(left_basis.T @ left @ left_basis).argsort(descending=True)
            by_cols = torch.diag(right_basis.T @ right @ right_basis).argsort(descending=True)
            second = second[by_rows][:, by_cols]
            left_basis = torch.linalg.qr(left @ left_basis[:, by_rows])[0]
            right_basis = torch.linalg.qr(right @ right_basis[:, by_cols])[0]
    return weight


def spread(seed: int, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Gradients of blocks of 8 whose singular values lie apart, so that rounding turns no eigenvector."""
    found = matrices(seed, shapes)
    for matrix in found:
        for block in (b for band in matrix.split(8) for b in band.split(8, dim=1)):
            left, _, right = torch.linalg.svd(block.clone())
            block.copy_(left @ torch.diag(torch.linspace(1, 3, 8)) @ right)
    return found


trained = partial(trained_by, make=SOAP)
VARIANTS = [{}, {"update_every": 1}, {"betas": (0.0, 0.9)}, {"eps": 1e-2}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_parameters_are_those_of_the_equations(settings: Mapping[str, object]) -> None:
    settings, shapes = {**SETTINGS, "block": 8, **settings}, [(24, 16), (8, 40)]
    values, grads = matrices(0, shapes), [spread(step, shapes) for step in range(1, 10)]
    in_float64 = [[grad.double() for grad in of_step] for of_step in grads]
    expected = by_blocks(train_block, [value.double() for value in values], in_float64, settings)
    assert_near(values, trained(values, grads, settings), expected, 1e-4)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_blocks_longer_than_wide_too(settings: Mapping[str, object]) -> None:
    """In float32, as rounding decides how eigenvectors lie where the first gradient has no part."""
    settings, values = {**SETTINGS, **settings}, matrices(0, SHAPES)
    grads = [matrices(step, SHAPES) for step in range(1, 10)]
    assert_near(
        values, trained(values, grads, settings), by_blocks(train_block, values, grads, settings), 1e-4
    )


def test_equal_blocks_in_a_batch_step_as_they_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, shapes = {**SETTINGS, "block": 8}, [(24, 16), (8, 40)]
    values, grads = matrices(0, shapes), [spread(step, shapes) for step in range(1, 10)]
    alone = trained(values, grads, settings)
    monkeypatch.setattr(block_algorithm, "steps_batches", lambda device: True)
    for a, b in zip(trained(values, grads, settings), alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_first_step_finds_eigenvectors_and_moves_nothing() -> None:
    param = nn.Parameter(matrices(0, [(20, 12)])[0])
    before = param.detach().clone()
    optimizer = SOAP([param], weight_decay=0.1)
    give_grads([param], matrices(1, [(20, 12)]))
    optimizer.step()
    assert torch.equal(param.detach(), before)
    vectors = optimizer.state[param]["right_vectors"][0, 0]
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(12), rtol=0, atol=1e-5)
    optimizer.step()
    assert not torch.equal(param.detach(), before)


def test_vectors_are_stepped_as_by_adamw() -> None:
    params = [[nn.Parameter(v) for v in matrices(0, [(9,), ()])] for _ in range(2)]
    optimizers = [SOAP(params[0]), torch.optim.AdamW(params[1], lr=3e-3, betas=(0.95, 0.95))]
    for step in range(4):
        for own, optimizer in zip(params, optimizers, strict=True):
            give_grads(own, matrices(step, [(9,), ()]))
            optimizer.step()
    for a, b in zip(*params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_defaults_are_those_of_the_paper_s_code() -> None:
    group = SOAP([torch.zeros(2, 2)]).param_groups[0]
    expected = {"lr": 3e-3, "betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01, "update_every": 10}
    assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"block": 0}, "block: expected at least 1, got 0"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SOAP([torch.zeros(2, 2)], **settings)
