"""Shampoo against its equations, written out again in float64, and what its settings promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit.optim import Shampoo, block_algorithm
from shardkit.optim.shampoo import ShampooRule
from tests.parity.test_muon import assert_same, give_grads, matrices

SHAPES = [(40, 24), (16, 16), (6, 50)]
SETTINGS: Mapping[str, object] = {
    "lr": 0.02,
    "betas": (0.9, 0.99),
    "eps": 1e-4,
    "weight_decay": 0.1,
    "block": 16,
    "update_every": 3,
    "start": 4,
    "graft": "adam",
    "graft_eps": 1e-8,
    "root": "eigh",
}


def reference(
    values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], settings: Mapping[str, object]
) -> list[Tensor]:
    """The parameters after all steps, in float64."""
    in_float64 = [[grad.double() for grad in of_step] for of_step in grads]
    return by_blocks(train_block, [value.double() for value in values], in_float64, settings)


def by_blocks(
    train_block: Callable[[Tensor, Sequence[Tensor], int, Mapping[str, object]], Tensor],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    settings: Mapping[str, object],
) -> list[Tensor]:
    """The parameters after all steps; block by block, nothing shared with the package."""
    finals = []
    for i, value in enumerate(values):
        number = crc32(f"{i} of group 0".encode())  # of its first block, by the name it has
        final = value.clone()
        for row in range(0, value.shape[0], settings["block"]):
            for col in range(0, value.shape[1], settings["block"]):
                part = (slice(row, row + settings["block"]), slice(col, col + settings["block"]))
                of_block = [of_step[i][part].contiguous() for of_step in grads]
                final[part] = train_block(final[part], of_block, number, settings)
                number += 1
        finals.append(final)
    return finals


def train_block(
    weight: Tensor, grads: Sequence[Tensor], number: int, settings: Mapping[str, object]
) -> Tensor:
    (beta1, beta2), every, graft = settings["betas"], settings["update_every"], settings["graft"]
    momentum, second = torch.zeros_like(weight), torch.zeros_like(weight)
    left = torch.zeros(len(weight), len(weight), dtype=torch.float64)
    right = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
    new = 1.0 if beta2 == 1.0 else 1 - beta2
    basis: list[Tensor | None] = [None, None]
    roots: list[Tensor] = []
    for step, grad in enumerate(grads, 1):
        momentum = beta1 * momentum + (1 - beta1) * grad
        second = beta2 * second + new * grad * grad
        left, right = beta2 * left + new * grad @ grad.T, beta2 * right + new * grad.T @ grad
        sum1, sum2 = 1 - beta1**step, 1.0 if beta2 == 1.0 else 1 - beta2**step
        target = {
            "adam": momentum / sum1 / ((second / sum2).sqrt() + settings["graft_eps"]),
            "rmsprop": momentum / sum1 / (second.sqrt() + settings["graft_eps"]),
        }.get(graft, momentum / sum1)
        due = step - settings["start"] - number % every
        if due >= 0 and due % every == 0:
            roots = []
            for side, matrix in enumerate((left / sum2, right / sum2)):
                damping = settings["eps"] * matrix.trace() / len(matrix)
                values, vectors = torch.linalg.eigh(matrix)
                if settings["root"] == "qr":
                    if basis[side] is None:
                        basis[side] = vectors.flip(1)
                    else:
                        estimates = torch.diag(basis[side].T @ matrix @ basis[side])
                        ordered = basis[side][:, estimates.argsort(descending=True)]
                        basis[side] = torch.linalg.qr(matrix @ ordered)[0]
                    vectors = basis[side]
                    values = torch.diag(vectors.T @ matrix @ vectors)
                roots.append(vectors @ torch.diag((values + damping) ** -0.25) @ vectors.T)
        direction = target
        if roots:
            direction = roots[0] @ (momentum / sum1) @ roots[1]
            if graft is not None:
                direction = direction * target.norm() / direction.norm()
        weight = (1 - settings["lr"] * settings["weight_decay"]) * weight - settings["lr"] * direction
    return weight


def trained(
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    settings: Mapping[str, object],
    make: Callable[..., Optimizer] = Shampoo,
) -> list[Tensor]:
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = make(params, **settings)
    for of_step in grads:
        give_grads(params, of_step)
        optimizer.step()
    return [param.detach() for param in params]


def assert_near(
    values: Sequence[Tensor], got: Sequence[Tensor], expected: Sequence[Tensor], rtol: float
) -> None:
    """Compares how far each parameter moved."""
    for i, (value, found, wanted) in enumerate(zip(values, got, expected, strict=True)):
        error = ((found.double() - wanted).norm() / (wanted - value.double()).norm()).item()
        assert error < rtol, f"param {i}: {error}"


VARIANTS: Mapping[str, Mapping[str, object]] = {
    "eigh": {},
    "qr": {"root": "qr"},
    "newton": {"root": "newton"},
    "sums": {"betas": (0.9, 1.0)},
    "no momentum": {"betas": (0.0, 0.99)},
    "sgd": {"graft": "sgd"},
    "rmsprop": {"graft": "rmsprop"},
    "no grafting": {"graft": None},
    "every step": {"update_every": 1, "start": 1, "eps": 0.1},
    "larger blocks": {"block": 32, "eps": 1e-2},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_of_the_equations(name: str) -> None:
    settings = {**SETTINGS, **VARIANTS[name]}
    values, grads = matrices(0, SHAPES), [matrices(step, SHAPES) for step in range(1, 13)]
    got, expected = trained(values, grads, settings), reference(values, grads, settings)
    assert_near(values, got, expected, 1e-5)


def test_a_block_steps_along_the_graft_until_its_first_root() -> None:
    """By default that is the step `update_every`, and later for other blocks; then it takes another way."""
    values, grads = matrices(0, [(32, 16)]), [matrices(step, [(32, 16)]) for step in range(1, 6)]
    settings = {"lr": 0.02, "block": 16, "update_every": 4, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    ways = []
    for num_steps in (3, 4, 5):
        (got,) = trained(values, grads[:num_steps], settings)
        adam = nn.Parameter(values[0].clone())
        oracle = torch.optim.AdamW([adam], lr=0.02, betas=(0.9, 0.99), weight_decay=0.0)
        for of_step in grads[:num_steps]:
            give_grads([adam], of_step)
            oracle.step()
        ways.append(
            [torch.allclose(got[rows], adam.detach()[rows], atol=1e-6) for rows in (slice(16), slice(16, 32))]
        )
    assert ways == [[True, True], [False, True], [False, False]]


def test_work_on_roots_is_spread_over_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    stock = torch.linalg.eigh

    def counting(matrix: Tensor) -> tuple[Tensor, Tensor]:
        counts[-1] += 1
        return stock(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", counting)
    params = [nn.Parameter(value) for value in matrices(0, [(32, 64)])]  # 8 blocks
    optimizer = Shampoo(params, block=16, update_every=4, start=1)
    for step in range(8):
        counts.append(0)
        give_grads(params, matrices(step, [tuple(p.shape) for p in params]))
        optimizer.step()
    assert counts == [4] * 8  # two blocks, two sides each


@pytest.mark.parametrize("root", ["eigh", "qr", "newton"])
def test_a_block_without_a_root_is_grafted_wholly_whatever_its_schedule_says(root: str) -> None:
    """A saved state may come from another schedule, or the schedule change: no block may stand still."""
    params = [nn.Parameter(value) for value in matrices(0, [(32, 48)])]
    optimizer = Shampoo(params, block=16, update_every=20, weight_decay=0.0, root=root)
    for step in range(8):
        optimizer.param_groups[0]["update_every"] = 20 if step < 5 else 4
        before = params[0].detach().clone()
        give_grads(params, matrices(step, [(32, 48)]))
        optimizer.step()
        moved = (params[0].detach() - before).unfold(0, 16, 16).unfold(1, 16, 16).flatten(2).norm(dim=-1)
        assert (moved > 1e-3).all(), moved
        assert torch.isfinite(params[0]).all()


def test_a_parameter_has_its_schedule_whatever_else_the_optimizer_holds() -> None:
    shapes = [(32, 48), (48, 32)]

    def train(names: Sequence[int]) -> Tensor:
        params = {i: nn.Parameter(value) for i, value in enumerate(matrices(0, shapes))}
        optimizer = Shampoo([(f"w{i}", params[i]) for i in names], block=16, update_every=3)
        for step in range(5):
            give_grads(list(params.values()), matrices(step, shapes))
            optimizer.step()
        return params[1].detach()

    assert torch.equal(train([0, 1]), train([1]))


@pytest.mark.parametrize("root", ["eigh", "qr", "newton"])
def test_equal_blocks_in_a_batch_step_as_they_do_alone(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators: with two groups, and blocks that are at another place of their schedule."""
    shapes, settings = [(32, 48), (40, 16), (16, 16)], {**SETTINGS, "root": root}
    values, grads = matrices(0, shapes), [matrices(step, shapes) for step in range(1, 10)]
    alone = trained(values, grads, settings)
    dims: list[int] = []
    stock = ShampooRule.step_blocks

    def watched(rule: ShampooRule, grad: Tensor, *rest: object) -> Tensor:
        dims.append(grad.ndim)
        return stock(rule, grad, *rest)

    monkeypatch.setattr(block_algorithm, "steps_batches", lambda device: True)
    monkeypatch.setattr(ShampooRule, "step_blocks", watched)
    together = trained(values, grads, settings)
    assert 3 in dims and len(dims) < 9 * 10
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_tiny_gradients_keep_their_direction() -> None:
    values = matrices(0, [(40, 24)])
    moved = []
    for factor in (1.0, 2.0**-30):
        grads = [[factor * g for g in matrices(step, [(40, 24)])] for step in range(1, 8)]
        settings = {**SETTINGS, "graft_eps": 0.0, "weight_decay": 0.0}
        moved.append(trained(values, grads, settings)[0] - values[0])
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-6)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    values = matrices(0, [(40, 24)])
    zeros = [[torch.zeros(40, 24)]] * 6
    for root in ("eigh", "qr", "newton"):
        got = trained(values, zeros, {**SETTINGS, "weight_decay": 0.0, "root": root})
        assert_same(got, values, root)


def test_stacks_and_convolutions_are_blocks_of_their_matrices() -> None:
    shapes = [(3, 20, 24), (8, 6, 2, 2)]
    settings = {**SETTINGS, "update_every": 1}
    values, grads = matrices(0, shapes), [matrices(step, shapes) for step in range(1, 8)]
    got = trained(values, grads, settings)
    flat = [[*of_step[0], of_step[1].view(8, 24)] for of_step in [values, *grads]]
    expected = trained(flat[0], flat[1:], settings)
    assert_same([got[0], got[1].view(8, 24)], [torch.stack(expected[:3]), expected[3]])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"betas": (1.0, 0.9)}, r"betas: expected numbers in \[0, 1\) and \(0, 1\], got \(1.0, 0.9\)"),
        ({"graft": "lion"}, "graft: expected .* got 'lion'"),
        ({"root": "svd"}, "root: expected .* got 'svd'"),
        ({"start": 0}, "start: expected a step of at least 1, or None, got 0"),
        ({"block": 0}, "block: expected at least 1, got 0"),
        ({"update_every": 0}, "update_every: expected at least 1, got 0"),
        ({"eps": -1.0}, "eps: expected a number >= 0, got -1.0"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shampoo([torch.zeros(2, 2)], **settings)
