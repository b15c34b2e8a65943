"""The life of an optimizer around its steps: state dicts, copies, pickles, parameters that come from meta."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardkit import Blocks, fully_shard, materialize_
from shardkit.checkpoint import set_optimizer_state_dict
from shardkit.optim import SOAP, AdamW, AdamW8bit, Muon, Shampoo
from shardkit.optim.algorithm import PieceAlgorithm
from shardkit.optim.optimizer import ShardedOptimizer
from tests.parity.test_muon import give_grads, matrices
from tests.support.ranks import errors_on_all_ranks, run_ranks

SHAPES = [(96, 64), (64, 96), (40,), (80, 64), (48, 80), (40, 24)]
WISHES: list[Blocks | None] = [None, Blocks(), Blocks.elements()]


class Weights(nn.Module):
    """Parameters of `SHAPES`, drawn by `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate(SHAPES):
            self.register_parameter(f"w{i}", nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.ones_(param)


def mixed(model: nn.Module, lr: float = 0.01, **settings: object) -> Muon:
    """Every algorithm in one optimizer."""
    named = list(model.named_parameters())
    groups = [
        {"params": named[:2]},
        {"params": named[2:3], "algorithm": "adamw"},
        {"params": named[3:4], "algorithm": "adamw8bit"},
        {"params": named[4:5], "algorithm": "shampoo", "block": 16, "update_every": 2},
        {"params": named[5:], "algorithm": "soap", "block": 16, "update_every": 1},
    ]
    return Muon(groups, lr=lr, row_norm_beta2=0.95, **settings)


def sharded_weights(world_size: int, wish: Blocks | None, on_meta: bool = False) -> Weights:
    with torch.device("meta" if on_meta else "cpu"):
        model = Weights()
    mesh = init_device_mesh("cpu", (world_size,))
    whole_rows = None if wish is None else Blocks()  # for AdamW8bit
    return fully_shard(
        model, mesh, shard_placement_fn=lambda param: whole_rows if param.shape == SHAPES[3] else wish
    )


def steps(optimizer: ShardedOptimizer, *numbers: int) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number in numbers:
        values = matrices(number, [tuple(param.shape) for param in params], params[0].dtype)
        give_grads(params, values)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(one: ShardedOptimizer, other: ShardedOptimizer) -> None:
    """Parameters, state and settings, to the bit."""
    for mine, theirs in zip(one.param_groups, other.param_groups, strict=True):
        assert {**mine, "params": None} == {**theirs, "params": None}
        for param, twin in zip(mine["params"], theirs["params"], strict=True):
            assert torch.equal(here(param), here(twin))
            assert one.state[param].keys() == other.state[twin].keys()
            for key, value in one.state[param].items():
                assert value.dtype == other.state[twin][key].dtype, key
                assert torch.equal(here(value), here(other.state[twin][key])), key


def here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_one_optimizer_of_five_algorithms_steps_as_five_optimizers(
    wish: Blocks | None, world_size: int
) -> None:
    def run(rank: int, world_size: int) -> None:
        models = [sharded_weights(world_size, wish) for _ in range(2)]
        one, named = mixed(models[0]), list(models[1].named_parameters())
        five = [
            Muon(named[:2], lr=0.01, row_norm_beta2=0.95),
            AdamW(named[2:3], lr=0.01, weight_decay=0.1),
            AdamW8bit(named[3:4], lr=0.01, weight_decay=0.1),
            Shampoo(named[4:5], lr=0.01, weight_decay=0.1, block=16, update_every=2),
            SOAP(named[5:], lr=0.01, weight_decay=0.1, block=16, update_every=1),
        ]
        for step in (1, 2, 3):
            for model in models:
                params = list(model.parameters())
                give_grads(params, matrices(step, SHAPES))
            for optimizer in (one, *five):
                optimizer.step()
        for param, twin in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(here(param), here(twin))
        assert "2 parameters elementwise" in str(one.plan())

    run_ranks(run, world_size)


def test_settings_of_a_loaded_state_dict_are_those_of_the_next_steps() -> None:
    optimizer, other = mixed(Weights()), mixed(Weights())
    saved = copy.deepcopy(other.state_dict())
    for group in saved["param_groups"]:
        group["lr"] = 0.0
    optimizer.load_state_dict(saved)
    steps(optimizer, 1)
    assert all((param == 1).all() for group in optimizer.param_groups for param in group["params"])
    optimizer.param_groups[0]["lr"] = 0.1  # as a scheduler does
    steps(optimizer, 2)
    assert (optimizer.param_groups[0]["params"][0] != 1).any()


def test_a_load_plans_every_parameter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, other = mixed(Weights()), mixed(Weights())
    saved, planned = other.state_dict(), list[str]()

    def counted(pieces: Callable[..., object]) -> Callable[..., object]:
        return lambda at, group, dealer: planned.append(at.name) or pieces(at, group, dealer)

    for algorithm in optimizer.algorithms.values():
        if isinstance(algorithm, PieceAlgorithm):
            monkeypatch.setattr(algorithm, "pieces", counted(algorithm.pieces))
    optimizer.load_state_dict(saved)
    assert sorted(planned) == ["w0", "w1", "w4", "w5"]
    for one in (optimizer, other):
        one.param_groups[0]["lr"] = 0.1  # the groups that a step reads are those that were loaded
        steps(one, 1)
    assert_equal(optimizer, other)


def test_settings_that_were_not_saved_stay() -> None:
    params, whole = ([nn.Parameter(value) for value in matrices(0, SHAPES)] for _ in range(2))
    optimizer, theirs = AdamW(params, lr=0.1), torch.optim.AdamW(whole, lr=0.01)
    give_grads(whole, matrices(1, SHAPES))
    theirs.step()
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["algorithm"] == "adamw" and optimizer.param_groups[0]["lr"] == 0.01
    steps(optimizer, 2)
    assert optimizer.state[params[0]]["step"] == 2


def test_loaded_state_keeps_the_dtypes_of_its_algorithm() -> None:
    """torch casts to the parameter's dtype, which would round the row variance of NorMuon."""
    optimizer, resumed = (mixed(Weights().bfloat16()) for _ in range(2))
    steps(optimizer, 1, 2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (first, *_) = resumed.param_groups[0]["params"]
    assert resumed.state[first]["row_variance"].dtype == torch.float32
    with torch.no_grad():
        for group, twins in zip(optimizer.param_groups, resumed.param_groups, strict=True):
            torch._foreach_copy_(twins["params"], group["params"])
    steps(optimizer, 3)
    steps(resumed, 3)
    assert_equal(optimizer, resumed)


def test_what_hooks_change_is_what_is_loaded() -> None:
    optimizer = mixed(Weights())
    (first, *_) = optimizer.param_groups[0]["params"]
    seen = []

    def ones(_: torch.optim.Optimizer, given: dict[str, dict[int, dict[str, Tensor]]]) -> None:
        given["state"][0]["momentum_buffer"] = torch.ones(SHAPES[0])

    def look(loaded: torch.optim.Optimizer) -> None:
        seen.append(loaded.state[first]["momentum_buffer"].sum().item())

    optimizer.register_load_state_dict_pre_hook(ones)
    optimizer.register_load_state_dict_post_hook(look)
    optimizer.load_state_dict(mixed(Weights()).state_dict())
    assert seen == [96 * 64.0]


def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    optimizer, before = mixed(Weights()), mixed(Weights())
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["row_variance"]
    with pytest.raises(ValueError, match=r"'w0': expected its row_variance to be \(96, 1\), got nothing"):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][2]["block"] = 128
    with pytest.raises(ValueError, match=r"group 2: this optimizer has block=256, .* with 128"):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["row_norm_beta2"] = None
    with pytest.raises(ValueError, match=r"group 0: this optimizer has row_norm_beta2=0.95, .* with None"):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"group 1: this optimizer has amsgrad=False, .* with True"):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["algorithm"] = "muon"
    saved["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=r"group 1: this optimizer has algorithm='adamw'.* with 'muon'"):
        optimizer.load_state_dict(saved)
    for index, key, bad in ((3, "betas", (2.0, 0.9)), (0, "split_rows", [5, 7]), (2, "eps", -1.0)):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][index][key] = bad
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert_equal(optimizer, before)


def test_state_of_blocks_stays_with_its_rank_whatever_a_loaded_group_says_of_their_cost() -> None:
    shapes = [(61, 115), (71, 38), (12, 108), (122, 75)]  # dealt otherwise where roots cost more

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        wholes = [torch.ones(shape) for shape in shapes]
        sets = [[distribute_tensor(whole, mesh, [Shard(0)]) for whole in wholes] for _ in range(2)]
        saved, resumed = (
            Shampoo(params, lr=0.01, block=40, update_every=every)
            for params, every in zip(sets, (1, 1000), strict=True)
        )
        steps(saved, 1, 2)
        for param, twin in zip(*sets, strict=True):
            here(twin).copy_(here(param))
        resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
        for optimizer in (saved, resumed):
            steps(optimizer, 3, 4)
        assert_equal(saved, resumed)

    run_ranks(run, 2)


def test_stochastic_rounding_may_be_switched_on_by_a_load() -> None:
    models = [Weights().bfloat16() for _ in range(2)]
    optimizer, rounding = (
        AdamW8bit(model.parameters(), stochastic_rounding=rounds, min_numel=1)
        for model, rounds in zip(models, (False, True), strict=True)
    )
    for each in (optimizer, rounding):
        steps(each, 1)
    models[0].load_state_dict(models[1].state_dict())
    optimizer.load_state_dict(rounding.state_dict())
    for each in (optimizer, rounding):
        steps(each, 2)
    assert_equal(optimizer, rounding)


COPIES: dict[str, Callable[[ShardedOptimizer], ShardedOptimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("wish", [None, Blocks.elements()], ids=str)
def test_a_copy_steps_as_the_original(how: str, wish: Blocks | None) -> None:
    def run(rank: int, world_size: int) -> None:
        for model in (Weights(), sharded_weights(world_size, wish)):
            optimizer = mixed(model, placement="owner", missing_grads="agree")
            steps(optimizer, 1, 2)
            twin = COPIES[how](optimizer)
            assert twin.plan() == optimizer.plan()
            before = [here(param).clone() for group in twin.param_groups for param in group["params"]]
            steps(optimizer, 3)
            now = [here(param) for group in twin.param_groups for param in group["params"]]
            assert all(map(torch.equal, now, before))
            steps(twin, 3)
            assert_equal(optimizer, twin)

    run_ranks(run, 2)


def test_a_copy_of_sharded_gradients_is_refused_by_name() -> None:
    def run(rank: int, world_size: int) -> None:
        model = sharded_weights(world_size, None)
        optimizer = mixed(model)
        model.w1.grad = model.w1.detach().clone()
        copy.deepcopy(optimizer)

    errors_on_all_ranks(run, 2, NotImplementedError, "param 'w1'", "zero_grad()")


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("materialise", ["materialize_", "to_empty"])
def test_parameters_that_come_from_meta_get_real_state(wish: Blocks | None, materialise: str) -> None:
    def run(rank: int, world_size: int) -> None:
        model = sharded_weights(world_size, wish, on_meta=True)
        optimizer = mixed(model)
        planned = str(optimizer.plan())
        if materialise == "to_empty":
            model.to_empty(device="cpu")
            model.reset_parameters()
        else:
            materialize_(model)
        expected = mixed(sharded_weights(world_size, wish))
        states = optimizer.state_dict()["state"].values()
        assert not any(value.is_meta for state in states for value in state.values())
        for built in (optimizer, expected):
            steps(built, 1, 2)
        assert_equal(optimizer, expected)
        assert str(optimizer.plan()) == planned

    run_ranks(run, 2)


def test_parameters_that_stay_on_meta_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = Weights()
    optimizer, saved = mixed(model), mixed(Weights()).state_dict()
    model.to_empty(device="cpu")  # the optimizer holds the parameters of before
    for use in (optimizer.step, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(ValueError, match=r"'w0' is on meta, as are 6 of 6.*build the optimizer after"):
            use()


def test_a_refused_group_is_left_out() -> None:
    optimizer = mixed(Weights())
    for params, words in (
        ([("w0", nn.Parameter(torch.ones(4, 4)))], "param 'w0': two parameters have this name"),
        ([("bias", nn.Parameter(torch.ones(4)))], "param 'bias'"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 5 and len(optimizer.state) == 6
    steps(optimizer, 1)


def test_all_algorithms_of_an_optimizer_step_upwards_together() -> None:
    model = Weights()
    optimizer = mixed(model, maximize=True, weight_decay=0.0)
    for _ in range(2):  # SOAP moves nothing in its first step
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert all(param.mean() > 1 for param in model.parameters())


def through_a_full_state_dict(
    rank: int, world_size: int, wish: Blocks | None, path: str
) -> list[dict[str, object]]:
    """Saved by rank 0 as one process would, and loaded into a fresh model and optimizer."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = sharded_weights(world_size, wish)
    optimizer = mixed(model, ns_dtype=torch.float32, adjust_lr=lambda rows, cols: 0.1)
    steps(optimizer, 1, 2)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save(full, path)
        assert full["state"]["w0"]["momentum_buffer"].shape == SHAPES[0]
    torch.distributed.barrier()
    twin = sharded_weights(world_size, wish)
    twin.load_state_dict(model.state_dict())
    other = mixed(twin, adjust_lr=lambda rows, cols: 0.1, lr=1.0)
    set_optimizer_state_dict(twin, other, torch.load(path, weights_only=True), options=options)
    for one in (optimizer, other):
        for group in one.param_groups:
            group.pop("adjust_lr", None)  # two functions
    assert_equal(optimizer, other)
    return [{k: v for k, v in group.items() if k != "params"} for group in full.get("param_groups", [])]


@pytest.mark.parametrize("wish", WISHES)
def test_full_state_dicts_are_gathered_by_torch_and_loaded_anywhere(
    wish: Blocks | None, tmp_path: Path
) -> None:
    groups = run_ranks(through_a_full_state_dict, 3, wish, str(tmp_path / "full.pt"))[0]
    assert groups[0]["ns_dtype"] == "torch.float32"
    assert groups[0]["adjust_lr"] == "a function"
    assert groups[0]["momentum"] == 0.95
