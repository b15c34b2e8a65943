"""Shampoo and SOAP on sharded parameters against themselves on one process: no difference, nowhere.

Gradients are given, equal on all ranks; parameters and all state are compared after every step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit import Blocks, fully_shard
from shardkit.checkpoint import set_optimizer_state_dict as set_full_optimizer_state_dict
from shardkit.collectives import count_traffic
from shardkit.optim import SOAP, AdamW, Muon, Shampoo, block_for, split_params
from shardkit.optim.optimizer import ShardedOptimizer
from shardkit.placement import RaggedShard
from shardkit.ragged import distribute_tensor
from tests.parity.test_muon import (
    GRIDS,
    assert_same,
    elements_of,
    give_grads,
    matrices,
    rows_of,
    sharded,
)
from tests.support.oracle import train_clipped
from tests.support.ranks import errors_on_all_ranks, run_ranks

SHAPES = [(48, 32), (24, 80), (33, 40), (3, 40), (64, 64), (3, 20, 24), (8, 6, 3, 3), (7,)]
WORLD_SIZES = [1, 2, 3, 4, 5]
Make = Callable[..., ShardedOptimizer]
OPTIMIZERS: Mapping[str, tuple[Make, Mapping[str, object]]] = {
    "shampoo": (Shampoo, {"lr": 0.02, "block": 16, "update_every": 3, "start": 2, "betas": (0.9, 0.99)}),
    "soap": (SOAP, {"lr": 0.02, "block": 16, "update_every": 2}),
}
both = pytest.mark.parametrize("name", OPTIMIZERS)
Snapshot = list[tuple[Tensor, dict[str, Tensor]]]


def made(name: str, params: Sequence[Tensor | tuple[str, Tensor]], **settings: object) -> ShardedOptimizer:
    make, defaults = OPTIMIZERS[name]
    return make(params, **{**defaults, **settings})


def placement_of(kind: int, shape: Sequence[int], world_size: int) -> Placement:
    if len(shape) == 1:
        return [Shard(0), rows_of(shape[0], world_size), Replicate()][kind % 3]
    numel = math.prod(shape)
    inside_rows = elements_of(numel, world_size)
    if len(shape) > 2:
        inside_rows = RaggedShard(tuple(range(len(shape))), inside_rows.local_units)
    kinds = [Shard(0), rows_of(shape[0], world_size), inside_rows, Shard(1), Replicate()]
    return kinds[kind % len(kinds)]


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def snapshot(optimizer: ShardedOptimizer, params: Sequence[Tensor]) -> Snapshot:
    """Copies of all parameters and state, whole."""
    return [
        (full(p.detach()).clone(), {k: full(v).clone() for k, v in optimizer.state[p].items()})
        for p in params
    ]


def train(
    optimizer: ShardedOptimizer, params: Sequence[Tensor], steps: int, first: int = 1
) -> list[Snapshot]:
    snapshots = []
    for step in range(first, first + steps):
        give_grads(params, matrices(step, [tuple(p.shape) for p in params], params[0].dtype))
        optimizer.step()
        snapshots.append(snapshot(optimizer, params))
    return snapshots


def assert_equal(got: Sequence[Snapshot], expected: Sequence[Snapshot], what: str = "") -> None:
    for step, (found, wanted) in enumerate(zip(got, expected, strict=True), 1):
        for i, ((param, state), (whole, whole_state)) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(param, whole), f"{what} step {step} param {i}: {(param - whole).abs().max()}"
            assert state.keys() == whole_state.keys()
            for key in state:
                assert torch.equal(state[key], whole_state[key]), f"{what} step {step} param {i} {key}"


def on_one_process(
    name: str, steps: int = 6, shapes: Sequence[tuple[int, ...]] = SHAPES, **settings: object
) -> list[Snapshot]:
    params = [nn.Parameter(v) for v in matrices(0, shapes)]
    return train(made(name, params, **settings), params, steps)


def by_name_on_one_process(name: str, steps: int) -> list[Snapshot]:
    """With the names that `Bag` has, from which the turns of blocks follow."""
    params = [nn.Parameter(v) for v in matrices(0, SHAPES)]
    return train(made(name, [(f"p{i}", param) for i, param in enumerate(params)]), params, steps)


@both
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_and_state_are_those_of_one_process_after_every_step(name: str, world_size: int) -> None:
    expected = on_one_process(name)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        for turn in (world_size, world_size + 2)[: 2 if world_size < 4 else 1]:
            params = sharded(
                matrices(0, SHAPES), mesh, lambda i, shape, t=turn: [placement_of(i + t, shape, world_size)]
            )
            optimizer = made(name, params, bucket_bytes=4000)
            assert_equal(train(optimizer, params, 6), expected, f"turn {turn}")

    run_ranks(run, world_size)


@both
def test_stepping_the_shards_as_matrices_of_their_own_fails_the_same_comparison(name: str) -> None:
    """The negative control: blocks that begin where a shard begins are another algorithm."""
    shapes = [(48, 32)]
    expected = on_one_process(name, shapes=shapes)
    whole = matrices(0, shapes)[0]
    halves = [nn.Parameter(half.clone()) for half in whole.split(24)]
    optimizer = made(name, halves)
    for step in range(1, 7):
        give_grads(halves, matrices(step, shapes)[0].split(24))
        optimizer.step()
    joined = torch.cat([half.detach() for half in halves])
    with pytest.raises(AssertionError, match="param 0"):
        assert_equal([[(joined, {})]], [[(expected[-1][0][0], {})]])
    moved, wanted = joined - whole, expected[-1][0][0] - whole
    assert torch.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0) < 0.99


@both
@pytest.mark.parametrize("kind", [*GRIDS, "nested"])
def test_two_axes(name: str, kind: str) -> None:
    shapes = [(48, 32), (24, 80), (32, 40)]
    grids = {**GRIDS, "nested": [[Shard(0), Shard(0)], [Shard(1), Shard(1)], [rows_of(16, 2), Shard(0)]]}
    expected = on_one_process(name, shapes=shapes)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        params = sharded(matrices(0, shapes), mesh, lambda i, shape: grids[kind][i])
        assert_equal(train(made(name, params), params, 6), expected, kind)

    run_ranks(run, 4)


@both
def test_plain_parameters_on_many_ranks_send_nothing(name: str) -> None:
    expected = on_one_process(name, 2)

    def run(rank: int, world_size: int) -> None:
        params = [nn.Parameter(v) for v in matrices(0, SHAPES)]
        with count_traffic() as traffic:
            assert_equal(train(made(name, params), params, 2), expected)
        assert not traffic.sent_bytes

    run_ranks(run, 2)


@both
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_what_travels_is_what_the_plan_says(name: str, world_size: int) -> None:
    def run(rank: int, world_size: int) -> int:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0, SHAPES), mesh, lambda i, shape: [placement_of(i, shape, world_size)])
        optimizer = made(name, params)
        give_grads(params, matrices(1, SHAPES))
        optimizer.step()
        with count_traffic() as traffic:
            optimizer.step()
        planned = sum(step.sent[rank] for step in optimizer.plan().steps if step.num_ranks > 1)
        assert dict(traffic.sent_bytes) == {"all_to_all": planned}
        return planned

    assert sum(run_ranks(run, world_size)) > 0


@both
def test_bands_that_no_boundary_cuts_do_not_travel(name: str) -> None:
    shapes = [(64, 40), (40, 64)]

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        lay = [[RaggedShard((0,), (16, 48))], [Shard(1)]]
        params = sharded(matrices(0, shapes), mesh, lambda i, shape: lay[i])
        optimizer = made(name, params, placement="local")
        give_grads(params, matrices(1, shapes))
        optimizer.step()  # the first asks whether all have come
        with count_traffic() as traffic:
            optimizer.step()
        assert not traffic.sent_bytes

    run_ranks(run, 2)


class Bag(nn.Module):
    """Parameters by name, on as many ranks as there are, in layouts that change with their number."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world_size,))
        for i, value in enumerate(matrices(0, SHAPES)):
            placement = placement_of(i + world_size, tuple(value.shape), world_size)
            setattr(self, f"p{i}", nn.Parameter(distribute_tensor(value, mesh, [placement])))


def continue_training(
    rank: int, world_size: int, name: str, folder: Path, first: int, last: int
) -> list[Snapshot]:
    model = Bag(world_size)
    optimizer = made(name, list(model.named_parameters()))
    if first > 1:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder / str(first - 1))
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    snapshots = train(optimizer, list(model.parameters()), last - first + 1, first)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / str(last))
    return snapshots


@both
@pytest.mark.filterwarnings("ignore")
def test_a_run_that_moves_between_numbers_of_ranks_is_one_run(name: str, tmp_path: Path) -> None:
    expected = by_name_on_one_process(name, 11)
    for world_size, last in zip((2, 4, 3, 2, 1), itertools.count(3, 2), strict=False):
        first = 1 if last == 3 else last - 1
        for got in run_ranks(continue_training, world_size, name, tmp_path, first, last):
            assert_equal(got, expected[first - 1 : last], f"{world_size} ranks")


@both
@pytest.mark.filterwarnings("ignore")
def test_full_state_goes_to_plain_parameters_and_back(name: str) -> None:
    """As torch's state dicts on rank 0 do; the plain run goes on as the sharded one would have."""
    expected, full_options = by_name_on_one_process(name, 5), StateDictOptions(full_state_dict=True)

    class Plain(nn.Module):
        def __init__(self, values: Sequence[Tensor]) -> None:
            super().__init__()
            for i, value in enumerate(values):
                setattr(self, f"p{i}", nn.Parameter(value.clone()))

    def run(rank: int, world_size: int) -> None:
        model = Bag(world_size)
        optimizer = made(name, list(model.named_parameters()))
        got = train(optimizer, list(model.parameters()), 2)
        whole = get_optimizer_state_dict(model, optimizer, options=full_options)
        plain = Plain([param for param, _ in got[-1]])
        resumed = made(name, list(plain.named_parameters()))
        set_optimizer_state_dict(plain, resumed, whole)
        assert_equal(got + train(resumed, list(plain.parameters()), 3, 3), expected, "plain")
        again = Bag(world_size)
        for param, (value, _) in zip(again.parameters(), got[-1], strict=True):
            param.detach().copy_(distribute_tensor(value, param.device_mesh, param.placements))
        back = made(name, list(again.named_parameters()))
        set_full_optimizer_state_dict(again, back, whole, options=full_options)
        assert_equal(train(back, list(again.parameters()), 3, 3), expected[2:], "back")

    run_ranks(run, 3)


def test_state_lies_with_the_ranks_that_work_on_it_and_only_there() -> None:
    def run(rank: int, world_size: int) -> int:
        mesh = init_device_mesh("cpu", (3,))
        params = sharded(matrices(0, [(64, 64)]), mesh, lambda i, shape: [Shard(0)])
        optimizer = made("shampoo", params)
        (step,) = optimizer.plan().steps
        owned = sum(rank in a.workers for a in step.assignments)
        left = optimizer.state[params[0]]["left"]
        assert left.shape == (4, 4, 16, 16) and left.to_local().shape == (owned, 16, 16)
        return owned

    assert run_ranks(run, 3) == [6, 6, 4]


@both
@pytest.mark.parametrize("missing", ["symmetric", "agree"])
def test_a_parameter_without_gradient_stays_as_it_is(name: str, missing: str) -> None:
    shapes = SHAPES[:4]

    def steps(optimizer: ShardedOptimizer, params: Sequence[Tensor]) -> list[Snapshot]:
        snapshots = []
        for step, absent in enumerate((1, None, 0, None), 1):
            give_grads(params, matrices(step, shapes))
            if absent is not None:
                params[absent].grad = None
            optimizer.step()
            snapshots.append(snapshot(optimizer, params))
        return snapshots

    whole = [nn.Parameter(v) for v in matrices(0, shapes)]
    expected = steps(made(name, whole), whole)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0, shapes), mesh, lambda i, s: [placement_of(i, s, world_size)])
        assert_equal(steps(made(name, params, missing_grads=missing), params), expected)

    run_ranks(run, 3)


@both
def test_state_is_there_before_the_first_step_and_of_blocks(name: str) -> None:
    param, bias = nn.Parameter(torch.zeros(40, 12)), nn.Parameter(torch.zeros(5))
    optimizer = made(name, [("w", param), ("b", bias)])
    state = {key: tuple(value.shape) for key, value in optimizer.state[param].items()}
    sides = ("root",) if name == "shampoo" else ("vectors",)
    assert state == {
        "step": (),
        "exp_avg": (3, 1, 16, 12),
        "exp_avg_sq": (3, 1, 16, 12),
        "left": (3, 1, 16, 16),
        "right": (3, 1, 12, 12),
        **{f"left_{side}": (3, 1, 16, 16) for side in sides},
        **{f"right_{side}": (3, 1, 12, 12) for side in sides},
    }
    assert optimizer.state[bias].keys() == {"step", "exp_avg", "exp_avg_sq"}


@both
def test_algorithms_share_an_optimizer_and_its_checkpoints(name: str, tmp_path: Path) -> None:
    shapes = [(48, 32), (40, 40), (7,), (24, 24)]
    algorithms = [name, "muon", "adamw", {"shampoo": "soap", "soap": "shampoo"}[name]]

    def groups(params: Sequence[Tensor]) -> list[dict[str, object]]:
        own = {"shampoo": {"block": 16, "update_every": 2}, "soap": {"block": 16}, "muon": {}, "adamw": {}}
        return [
            {"params": [(str(i), p)], "algorithm": a, **own[a]}
            for i, (p, a) in enumerate(zip(params, algorithms, strict=True))
        ]

    whole = [nn.Parameter(v) for v in matrices(0, shapes)]
    expected = train(AdamW(groups(whole), lr=0.01), whole, 4)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0, shapes), mesh, lambda i, s: [placement_of(i, s, world_size)])
        optimizer = Muon(groups(params), lr=0.01, weight_decay=0.01)
        got = train(optimizer, params, 2)
        other = sharded([full(p.detach()) for p in params], mesh, lambda i, s: list(params[i].placements))
        resumed = Muon(groups(other), lr=0.5)
        resumed.load_state_dict(optimizer.state_dict())
        assert_equal(got + train(resumed, other, 2, 3), expected)

    run_ranks(run, 3)


def test_loaded_state_keeps_its_dtype_and_layout_and_groups_stay_the_ones_that_are_stepped() -> None:
    """torch's own load casts state to the parameter's dtype and replaces the groups."""

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        shapes = [(40, 32), (48, 16)]

        def params() -> list[nn.Parameter]:
            values = matrices(0, shapes, torch.bfloat16)
            return sharded(values, mesh, lambda i, shape: [RaggedShard((0,), (24, shape[0] - 24))])

        first, second = params(), params()
        saved = made("shampoo", first)
        train(saved, first, 3)
        resumed = made("shampoo", second)
        own = {p: resumed.state[p]["left"].placements for p in second}
        resumed.load_state_dict(saved.state_dict())
        for a, b in zip(first, second, strict=True):
            assert resumed.state[b]["left"].dtype == torch.float32
            assert resumed.state[b]["left"].placements == own[b]
            assert torch.equal(full(saved.state[a]["left_root"]), full(resumed.state[b]["left_root"]))
        before = [full(p.detach()).clone() for p in second]
        resumed.param_groups[0]["lr"] = 0.0
        give_grads(second, matrices(4, shapes, torch.bfloat16))
        resumed.step()
        assert_same(second, before)

    run_ranks(run, 2)


class Net(nn.Module):
    """Gradients of full rank in every block of 8: rounding decides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 40), nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@both
@pytest.mark.parametrize("blocks", [None, Blocks(), Blocks.elements(), "wish"])
def test_a_sharded_model_accumulates_clips_and_then_steps_once(
    name: str, blocks: Blocks | str | None
) -> None:
    def run(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        whole, model = Net(), Net()
        model.load_state_dict(whole.state_dict())
        wish = lambda p: block_for(p.shape, name, block=8) if blocks == "wish" else blocks  # noqa: E731
        fully_shard(model, shard_placement_fn=wish)
        optimizer = made(name, list(model.named_parameters()), block=8)
        reference = made(name, list(whole.named_parameters()), block=8)
        train_clipped(model, optimizer, whole, reference, num_steps=3, batch_shape=(64, 16))
        for got, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor(), expected, rtol=0, atol=2e-3)

    for world_size in (2, 3):
        run_ranks(run, world_size)


@both
def test_schedulers_closures_and_tensor_learning_rates(name: str) -> None:
    runs = []
    for lr in (0.02, torch.tensor(0.02)):
        params = [nn.Parameter(v) for v in matrices(0, [(8, 6), (5,)])]
        optimizer = made(name, params, lr=lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            give_grads(params, matrices(step, [(8, 6), (5,)]))
            assert optimizer.step(lambda: 7.0) == 7.0
            schedule.step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@both
def test_maximize_is_a_step_down_the_negative_gradient(name: str) -> None:
    runs = []
    for sign in (1, -1):
        params = [nn.Parameter(v) for v in matrices(0, [(20, 18), (5,)])]
        optimizer = made(name, params, maximize=sign < 0)
        for step in range(4):
            give_grads(params, [sign * g for g in matrices(step, [(20, 18), (5,)])])
            optimizer.step()
        runs.append(params)
    assert_same(runs[0], [p.detach() for p in runs[1]])


def test_blocks_that_are_cut_are_refused_where_they_must_be_local() -> None:
    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        params = sharded(matrices(0, [(40, 8)]), mesh, lambda i, shape: [Shard(0)])
        Shampoo([("w", params[0])], block=16, placement="local").plan()

    errors_on_all_ranks(run, 2, ValueError, "param 'w[16:32]'", "block_for(p.shape, 'shampoo'")


def test_groups_of_a_model_go_to_the_algorithm_that_is_asked_for() -> None:
    groups = split_params(Net(), algorithm="shampoo")
    assert [group["algorithm"] for group in groups] == ["shampoo", "adamw"]
    optimizer = Shampoo(groups, lr=0.01)
    assert optimizer.param_groups[1]["lr"] == 0.01
    assert "elementwise" in str(optimizer.plan())


def test_a_plan_of_meta_parameters() -> None:
    optimizer = Shampoo([("w", nn.Parameter(torch.empty(8, 4, device="meta")))], block=4)
    assert "w[0:4]            4 x 4  local" in str(optimizer.plan())
