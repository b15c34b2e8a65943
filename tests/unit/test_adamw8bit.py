"""AdamW8bit on one process: against torchao where that is installed, float32 AdamW, its own rules."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from shardkit.optim import AdamW8bit, convert_torchao_state
from shardkit.optim.batches import RowRange, batches_of_rows
from shardkit.optim.blockwise import BlockFormat
from shardkit.optim.codes import code_map, decode, encode, pack_nibbles, unpack_nibbles
from shardkit.optim.rounding import random_bits, round_stochastically
from tests.support.torchao import eager_adam

SHAPES = [(64, 256), (100, 512), (32,), (3, 64, 256), (16, 16, 4, 4), (70, 1)]


def torchao() -> ModuleType:
    """The oracle."""
    pytest.importorskip("torchao", reason="the oracle, torchao, is not installed")
    return eager_adam()


def params_of(
    shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step + 1)
        for param in params:
            grad = torch.randn(param.shape, generator=generator)
            row_sizes = torch.randn(param.shape[0], *[1] * (param.ndim - 1), generator=generator).exp()
            param.grad = (grad * row_sizes).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "settings"),
    [("AdamW8bit", {}), ("AdamW4bit", {"bits": 4, "block": 128}), ("AdamWFp8", {"format": "e4m3"})],
)
def test_codes_are_those_of_torchao_and_parameters_within_2e_6(
    name: str, settings: dict[str, object]
) -> None:
    ours, theirs = params_of(), params_of()
    optimizer, oracle = AdamW8bit(ours, 1e-2, **settings), getattr(torchao(), name)(theirs, 1e-2)
    train(ours, optimizer, range(3))
    train(theirs, oracle, range(3))
    num_compared = 0
    for param, other in zip(ours, theirs, strict=True):
        assert (param - other).abs().max() < 2e-6
        state, expected = optimizer.state[param], oracle.state[other]
        for moment in ("exp_avg", "exp_avg_sq"):
            if hasattr(expected[moment], "codes") and f"{moment}_codes" in state:
                num_compared += 1
                codes = expected[moment].codes.view(torch.uint8).flatten()
                assert torch.equal(state[f"{moment}_codes"].flatten(), codes)
                assert torch.equal(state[f"{moment}_scales"].flatten(), expected[moment].scale.flatten())
    assert num_compared == 8


def test_state_of_torchao_goes_on_as_ours() -> None:
    shapes = [(64, 256), (32,), (64, 200), (5000,), (130, 96)]
    ours, theirs = params_of(shapes), params_of(shapes)
    oracle = torchao().AdamW8bit(theirs, 1e-2)
    train(theirs, oracle, range(4))
    optimizer = AdamW8bit(ours)
    optimizer.load_state_dict(convert_torchao_state(oracle.state_dict(), optimizer))
    first = optimizer.state[ours[0]]
    assert torch.equal(first["exp_avg_codes"], oracle.state[theirs[0]]["exp_avg"].codes)
    assert first["step"] == 4 and float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2)
    for param, other in zip(ours, theirs, strict=True):
        param.data.copy_(other.data)
    train(ours, optimizer, range(4, 6))
    train(theirs, oracle, range(4, 6))
    for param, other in zip(ours, theirs, strict=True):
        assert (param - other).abs().max() < (2e-6 if param.shape == (64, 256) else 1e-3)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({}, 0.02), ({"format": "e4m3"}, 0.04), ({"tile": (128, 128)}, 0.04), ({"bits": 4}, 0.3)],
)
def test_the_update_is_close_to_that_of_float32(settings: dict[str, object], tolerance: float) -> None:
    start, ours, exact = (params_of([(128, 600)])[0] for _ in range(3))
    train([ours], AdamW8bit([ours], 1e-2, **settings), range(10))
    train([exact], torch.optim.AdamW([exact], 1e-2), range(10))
    assert (ours - exact).norm() < tolerance * (exact - start).norm()


def test_small_parameters_are_stepped_as_by_adamw() -> None:
    ours, exact = params_of([(5,), (20, 30)]), params_of([(5,), (20, 30)])
    train(ours, AdamW8bit(ours, 1e-2, maximize=True), range(4))
    train(exact, torch.optim.AdamW(exact, 1e-2, maximize=True), range(4))
    for param, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=1e-6)


def test_a_tile_that_spans_decades_keeps_small_second_moments_as_roots() -> None:
    moment = torch.full((128, 128), 1e-9)
    moment[0] = 1.0
    scale_of_row = torch.zeros(128, dtype=torch.int64)
    plain, root = (BlockFormat(128, signed=False, square_root=root) for root in (False, True))
    flushed, kept = (f.dequantize(f.quantize(moment, scale_of_row), 128, scale_of_row) for f in (plain, root))
    assert (flushed[1:] == 0).all() and (kept[1:] > 0).all()


@pytest.mark.parametrize(("bits", "limit"), [(8, 2.1), (4, 1.1)])
def test_state_bytes_a_parameter(bits: int, limit: float) -> None:
    (param,) = params_of([(256, 1024)])
    optimizer = AdamW8bit([param], bits=bits)
    num_bytes = sum(state.numel() * state.element_size() for state in optimizer.state[param].values())
    assert num_bytes / param.numel() < limit


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_encoding_finds_the_nearest_value(signed: bool, bits: int) -> None:
    table = code_map(signed, bits, torch.device("cpu"))
    assert torch.equal(encode(table.values, table), torch.arange(2**bits).to(torch.uint8))
    edges, below = table.edges[:-1], torch.nextafter(table.edges[:-1], torch.tensor(-2.0))
    assert torch.equal(encode(edges, table).int(), torch.arange(1, 2**bits).int())
    assert torch.equal(encode(below, table).int(), torch.arange(2**bits - 1).int())
    numbers = torch.linspace(-1 if signed else 0, 1, 100_001)
    distance = (numbers - decode(encode(numbers, table), table)).abs()
    nearest = (numbers[:, None] - table.values[None]).abs().amin(1)
    assert (distance <= nearest + 1e-7).all()


def test_nibbles_come_back() -> None:
    codes = torch.randint(0, 16, (5, 7), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), 7), codes)


def test_rows_do_not_know_of_one_another() -> None:
    form, moment = BlockFormat(), torch.randn(6, 600)
    together, alone = form.quantize(moment), form.quantize(moment[2:3].contiguous())
    assert torch.equal(together.codes[2:3], alone.codes) and torch.equal(together.scales[2:3], alone.scales)


def test_batches_hold_every_row_once() -> None:
    batches = batches_of_rows((3, 0, 5), 4)
    assert batches == ((RowRange(0, 0, 3), RowRange(2, 0, 1)), (RowRange(2, 1, 5),))
    assert batches_of_rows((0,), 4) == ()


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    number, count = 1.0 + 2**-7 * 0.3, 40_000  # 0.3 of the way between two bfloat16 numbers
    rounded = round_stochastically(torch.full((count,), number), torch.arange(count), seed=1, step=2).double()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    deviation = 2**-7 * (0.3 * 0.7 / count) ** 0.5
    assert abs(rounded.mean() - number) < 3 * deviation


def test_stochastic_rounding_is_keyed_by_seed_step_and_place_alone() -> None:
    place = torch.arange(1000)
    bits = random_bits(place, 1, 2)
    assert torch.equal(bits[500:], random_bits(place[500:], 1, 2))
    assert len(set(bits.tolist())) == 1000
    for seed, step in ((2, 2), (1, 3), (2, 1), (2**63 + 5, 2)):
        assert not (bits == random_bits(place, seed, step)).any()
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    kept = round_stochastically(special, torch.arange(4), 0, 1).float()
    torch.testing.assert_close(kept, special, equal_nan=True)


def test_bfloat16_learns_from_updates_below_its_spacing() -> None:
    def mean_after(stochastic: bool) -> float:
        param = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = AdamW8bit([param], 1e-4, weight_decay=0.0, stochastic_rounding=stochastic)
        for _ in range(20):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return float(param.detach().float().mean())

    assert mean_after(False) == 1.0
    assert mean_after(True) == pytest.approx(1.0 - 20e-4, rel=2e-4)


def test_a_tensor_lr_a_closure_and_missing_gradients() -> None:
    (first, second), (third, fourth) = params_of([(64, 64), (64, 64)]), params_of([(64, 64), (64, 64)])
    ours, other = AdamW8bit([first, second], torch.tensor(1e-2)), AdamW8bit([third, fourth], 1e-2)
    for optimizer, param in ((ours, first), (other, third)):
        param.grad = torch.ones_like(param)
        assert optimizer.step(lambda: 3.0) == 3.0
    torch.testing.assert_close(first, third, rtol=0, atol=1e-7)
    assert torch.equal(second, fourth) and ours.state[second]["step"] == 0


def test_state_dicts_keep_codes_and_scales_of_bfloat16_parameters() -> None:
    ours, other = params_of(dtype=torch.bfloat16), params_of(dtype=torch.bfloat16)
    optimizer, resumed = AdamW8bit(ours), AdamW8bit(other)
    train(ours, optimizer, range(2))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, twin in zip(ours, other, strict=True):
        assert optimizer.state[param].keys() == resumed.state[twin].keys()
        for key, value in optimizer.state[param].items():
            assert resumed.state[twin][key].dtype == value.dtype
            assert torch.equal(resumed.state[twin][key], value)
        twin.data.copy_(param.data)
    train(ours, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert all(map(torch.equal, ours, other))


def test_a_copy_steps_as_the_original() -> None:
    ours = params_of()
    optimizer = AdamW8bit(ours)
    twin = copy.deepcopy(optimizer)
    copies: list[Tensor] = twin.param_groups[0]["params"]
    train(ours, optimizer, range(2))
    train(copies, twin, range(2))
    assert all(map(torch.equal, ours, copies))


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"eps": -1.0},
        {"weight_decay": -1.0},
        {"block": 3},
        {"bits": 5},
        {"bits": 4, "format": "e4m3"},
        {"format": "int8"},
        {"second_moment": "root"},
        {"tile": (128, 3)},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        AdamW8bit(params_of(), **settings)


def test_wrong_parameters_gradients_and_states_are_named() -> None:
    with pytest.raises(TypeError, match="'mask'"):
        AdamW8bit([("mask", torch.ones(3, dtype=torch.int64))])
    with pytest.raises(ValueError, match="'w' is on meta"):
        AdamW8bit([("w", nn.Parameter(torch.ones(3, device="meta")))]).step()
    with pytest.raises(ValueError, match="'w' is not contiguous"):
        AdamW8bit([("w", nn.Parameter(torch.ones(3, 4).T))])
    param = nn.Parameter(torch.ones(64, 64))
    optimizer = AdamW8bit([("w", param)])
    param.grad = torch.ones(64, 64).to_sparse()
    with pytest.raises(ValueError, match="'w': its gradient is sparse"):
        optimizer.step()
    saved = AdamW8bit([param], format="e4m3").state_dict()
    with pytest.raises(ValueError, match="format='e4m3'"):
        optimizer.load_state_dict(saved)
    saved = AdamW8bit([nn.Parameter(torch.ones(64, 65))]).state_dict()
    with pytest.raises(ValueError, match=r"'w': expected its exp_avg_codes to be \(64, 64\)"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="no tile"):
        convert_torchao_state(saved, AdamW8bit([param], bits=4))


def test_names_without_names_are_numbers() -> None:
    with pytest.raises(ValueError, match="'1 of group 0' is not contiguous"):
        AdamW8bit([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 4).T)])
