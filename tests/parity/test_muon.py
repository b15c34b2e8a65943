"""Muon on sharded parameters against torch.optim.Muon on whole ones: no difference at all in float32.

Gradients are given, equal on all ranks, so that nothing but the optimizer can differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

import shardkit.optim.engine
import shardkit.optim.teams
from shardkit import Blocks, fully_shard
from shardkit.agreement import check_agreement
from shardkit.collectives import all_to_all, count_traffic
from shardkit.errors import PlanMismatchError
from shardkit.optim import Muon
from shardkit.optim.muon import MuonAlgorithm
from shardkit.optim.newton_schulz import TABLES, newton_schulz
from shardkit.placement import RaggedShard
from shardkit.ragged import distribute_tensor
from tests.support.oracle import train_clipped
from tests.support.ranks import errors_on_all_ranks, run_ranks

SHAPES = [(48, 32), (24, 80), (33, 40), (3, 40), (64, 64)]
WORLD_SIZES = [1, 2, 3, 4, 5, 8]


def rows_of(num_rows: int, world_size: int) -> RaggedShard:
    """Uneven rows, and none on the middle ranks."""
    units = [0] * world_size
    units[0] += num_rows // 3
    units[-1] += num_rows - num_rows // 3
    return RaggedShard((0,), tuple(units))


def elements_of(numel: int, world_size: int) -> RaggedShard:
    """Cuts inside rows."""
    units = [numel // world_size + (i % 2) for i in range(world_size - 1)]
    return RaggedShard((0, 1), (*units, numel - sum(units)))


def placements_of(i: int, shape: Sequence[int], world_size: int) -> list[Placement]:
    kinds = [
        Shard(0),
        rows_of(shape[0], world_size),
        elements_of(math.prod(shape), world_size),
        Shard(1),
        Replicate(),
    ]
    return [kinds[i % len(kinds)]]


def matrices(
    seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


Lay = Callable[[int, Sequence[int]], list[Placement]]


def sharded(values: Sequence[Tensor], mesh: DeviceMesh, lay: Lay) -> list[nn.Parameter]:
    return [nn.Parameter(distribute_tensor(v, mesh, lay(i, v.shape))) for i, v in enumerate(values)]


def give_grads(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(value, param.device_mesh, param.placements)
        else:
            param.grad = value.clone()


def assert_same(params: Sequence[Tensor], expected: Sequence[Tensor], what: str = "") -> None:
    for i, (param, whole) in enumerate(zip(params, expected, strict=True)):
        full = param.full_tensor() if isinstance(param, DTensor) else param
        assert torch.equal(full, whole), f"{what} param {i}: {(full - whole).abs().max().item()}"


def train(params: list[nn.Parameter], steps: int = 3, **settings: object) -> list[nn.Parameter]:
    optimizer = Muon(params, lr=0.02, **settings)
    for step in range(steps):
        give_grads(params, matrices(step + 1, [tuple(p.shape) for p in params], params[0].dtype))
        optimizer.step()
    return params


def train_torch(values: Sequence[Tensor], steps: int = 3, **settings: object) -> list[nn.Parameter]:
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = torch.optim.Muon(params, lr=0.02, **settings)
    for step in range(steps):
        give_grads(params, matrices(step + 1, [tuple(p.shape) for p in params], values[0].dtype))
        optimizer.step()
    return params


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_float32_parameters_equal_those_of_torch_on_one_process(world_size: int) -> None:
    oracles = {
        nesterov: train_torch(matrices(0), adjust_lr_fn="match_rms_adamw", nesterov=nesterov)
        for nesterov in (True, False)
    }

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        lay: Lay = lambda i, shape: placements_of(i, shape, world_size)  # noqa: E731
        for placement in ("owner", "replicate", "auto"):
            for nesterov, expected in oracles.items():
                params = sharded(matrices(0), mesh, lay)
                train(params, placement=placement, bucket_bytes=4000, nesterov=nesterov)
                assert_same(params, expected, placement)

    run_ranks(run, world_size)


GRIDS: Mapping[str, list[list[Placement]]] = {
    "hsdp": [[Replicate(), rows_of(48, 2)], [Replicate(), Shard(0)], [Replicate(), Shard(0)]],
    "tp": [[rows_of(24, 2), Shard(0)], [rows_of(24, 2), Shard(1)], [Shard(1), Shard(0)]],
    "elements": [[elements_of(48 * 16, 2), Shard(1)], [Shard(0), Shard(1)], [Replicate(), Replicate()]],
}


@pytest.mark.parametrize("kind", GRIDS)
def test_two_axes(kind: str) -> None:
    shapes = [(48, 32), (24, 80), (32, 40)]
    expected = train_torch(matrices(0, shapes), adjust_lr_fn="match_rms_adamw")
    normuon = train([nn.Parameter(v) for v in matrices(0, shapes)], row_norm_beta2=0.95)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for oracle, settings in ((expected, {}), (normuon, {"row_norm_beta2": 0.95})):
            params = sharded(matrices(0, shapes), mesh, lambda i, shape: GRIDS[kind][i])
            assert_same(train(params, **settings), oracle, kind)

    run_ranks(run, 4)


def test_plain_parameters_and_those_of_several_meshes_go_into_one_optimizer() -> None:
    """Three sets of ranks: one alone, a half, all of them, by one axis and by two."""
    shapes = [(48, 32), (24, 80), (33, 40), (64, 64)]
    expected = train_torch(matrices(0, shapes), adjust_lr_fn="match_rms_adamw")

    def run(rank: int, world_size: int) -> None:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        one, (plain, half, row, both) = init_device_mesh("cpu", (4,)), matrices(0, shapes)
        params = [
            nn.Parameter(plain),
            nn.Parameter(distribute_tensor(half, grid["a"], [rows_of(24, 2)])),
            nn.Parameter(distribute_tensor(row, one, [Shard(0)])),
            nn.Parameter(distribute_tensor(both, grid, [rows_of(64, 2), Shard(1)])),
        ]
        assert_same(train(params, placement="owner"), expected)
        assert len(Muon(params).plan().steps) == 3  # the last two have the same ranks

    run_ranks(run, 4)


UNEVEN_TP: Mapping[str, tuple[tuple[int, ...], Placement, Mapping[int, tuple[int, ...]]]] = {
    "rows": ((33, 20), Shard(0), {0: (7, 0, 10), 1: (0, 15, 1)}),  # of 17 and 16 rows
    "columns": ((24, 21), Shard(1), {0: (9, 15, 0), 1: (4, 0, 20)}),
}


@pytest.mark.parametrize("kind", UNEVEN_TP)
@pytest.mark.parametrize("beta2", [None, 0.95])
def test_tensor_parallelism_that_divides_unevenly(kind: str, beta2: float | None) -> None:
    """Each tensor-parallel rank has other ragged cuts; no rank has the same rows as another."""
    shape, tp, units_at = UNEVEN_TP[kind]
    whole = train([nn.Parameter(v) for v in matrices(0, [shape])], row_norm_beta2=beta2)

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        units = units_at[mesh.get_coordinate()[1]]
        params = sharded(matrices(0, [shape]), mesh, lambda i, shape: [RaggedShard((0,), units), tp])
        assert_same(train(params, row_norm_beta2=beta2, placement="owner"), whole, kind)

    run_ranks(run, 6)


def test_hybrid_sharding_sends_between_the_shards_alone() -> None:
    """Each replica does the same; none falls back to gathering full tensors."""

    def run(rank: int, world_size: int) -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        params = sharded(matrices(0, [(48, 32)]), mesh, lambda i, shape: [Replicate(), rows_of(48, 2)])
        with count_traffic() as traffic:
            train(params, steps=1, placement="owner")
        return traffic.sent_bytes["all_to_all"]

    assert run_ranks(run, 4) == [16 * 32 * 2] * 4  # a third of the rows, one way each


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_what_travels_is_what_the_plan_says(world_size: int) -> None:
    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0), mesh, lambda i, shape: placements_of(i, shape, world_size))
        optimizer = Muon(params, row_norm_beta2=0.95)
        give_grads(params, matrices(1))
        optimizer.step()
        with count_traffic() as traffic:
            optimizer.step()
        planned = sum(step.sent[rank] for step in optimizer.plan().steps if step.num_ranks > 1)
        assert dict(traffic.sent_bytes) == {"all_to_all": planned}

    run_ranks(run, world_size)


def test_plans_are_compared_once_and_two_gathers_are_under_way_while_a_bucket_is_worked_on() -> None:
    def run(rank: int, world_size: int) -> None:
        asked: list[object] = []
        flown: list[bool] = []

        def ask(*args: object) -> None:
            asked.append(args)
            check_agreement(*args)

        def fly(*args: object, back: bool) -> object:
            flown.append(back)
            return all_to_all(*args, back=back)

        shardkit.optim.teams.check_agreement = ask  # of this forked rank
        shardkit.optim.engine.all_to_all = fly
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0), mesh, lambda i, shape: [Shard(0)])
        train(params, placement="owner", bucket_bytes=1)
        assert len(asked) == 1
        gathers_before = [flown[:at].count(False) for at, back in enumerate(flown) if back]
        of_a_step = [min(number + 2, len(SHAPES)) for number in range(1, len(SHAPES) + 1)]
        assert gathers_before == [step * len(SHAPES) + n for step in range(3) for n in of_a_step]

    run_ranks(run, 2)


def whole_results(dtype: torch.dtype = torch.float32, **settings: object) -> list[nn.Parameter]:
    return train([nn.Parameter(v) for v in matrices(0, dtype=dtype)], **settings)


VARIANTS: Mapping[str, Mapping[str, object]] = {
    "normuon": {"row_norm_beta2": 0.95},
    "normuon, float32": {"row_norm_beta2": 0.9, "ns_dtype": torch.float32},
    "polar express": {"coefficients": "polar_express", "adjust_lr": "sqrt_ratio"},
    "float32": {"ns_dtype": torch.float32, "adjust_lr": "sqrt_max"},
    "float32 on the wire": {"comm_dtype": torch.float32},
    "plug": {
        "orthogonalize": lambda stack: stack / torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True)
    },
    "maximize": {"maximize": True, "adjust_lr": lambda rows, cols: 1.0},
}


MANY = [*SHAPES, (3, 16, 24), (32, 24), (8, 3, 5, 5)]
OF_GROUP = {6: {"split_rows": (16, 8, 8), "heads": 4}}


def place_many(i: int, shape: Sequence[int], world_size: int) -> list[Placement]:
    """A stack cut inside its matrices, heads cut and empty shards, a convolution; else as `placements_of`."""
    of_stack = RaggedShard((0, 1), rows_of(48, world_size).local_units)
    extra = {5: [of_stack], 6: [rows_of(32, world_size)], 7: [Shard(0)]}
    return extra.get(i) or placements_of(i, shape, world_size)


def every_step(params: list[nn.Parameter], **settings: object) -> Iterator[list[Tensor]]:
    """The whole parameters after each of three steps."""
    groups = [{"params": [p], **OF_GROUP.get(i, {})} for i, p in enumerate(params)]
    optimizer = Muon(groups, lr=0.02, **settings)
    for step in range(3):
        give_grads(params, matrices(step + 1, MANY))
        optimizer.step()
        yield [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in params]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_every_variant_is_the_same_at_any_world_size_after_every_step(world_size: int) -> None:
    expected = {
        name: list(every_step([nn.Parameter(v) for v in matrices(0, MANY)], **settings))
        for name, settings in VARIANTS.items()
    }

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        for name, settings in VARIANTS.items():
            params = sharded(matrices(0, MANY), mesh, lambda i, shape: place_many(i, shape, world_size))
            for step, got in enumerate(every_step(params, **settings)):
                assert_same(got, expected[name][step], f"{name}, step {step},")

    run_ranks(run, world_size)


def test_bfloat16_on_the_wire_loses_nothing() -> None:
    assert_same(whole_results(), [p.detach() for p in whole_results(comm_dtype=torch.float32)])


def test_bfloat16_parameters_stay_within_an_ulp_of_torch() -> None:
    expected = train_torch(matrices(0, dtype=torch.bfloat16), adjust_lr_fn="match_rms_adamw")

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        values = matrices(0, dtype=torch.bfloat16)
        params = train(sharded(values, mesh, lambda i, shape: placements_of(i, shape, world_size)))
        for param, whole in zip(params, expected, strict=True):
            got, one = param.full_tensor().detach(), whole.detach()
            larger = torch.maximum(got.abs(), one.abs()).float()
            ulp = torch.exp2(
                larger.clamp(min=2.0**-6).log2().floor() - 7
            )  # below 2^-6 a step is rounded by more
            assert ((got.float() - one.float()).abs() <= ulp).all()

    run_ranks(run, 3)


def test_orthogonalising_the_shards_instead_fails_the_same_comparison() -> None:
    """The negative control: what a rank makes of its rows is another algorithm, and the test sees it."""
    expected = train_torch(matrices(0), adjust_lr_fn="match_rms_adamw")
    plain = [nn.Parameter(v.clone()) for v in matrices(0)]
    halves = [[nn.Parameter(half.clone()) for half in p.detach().chunk(2)] for p in plain]
    for i in range(2):
        optimizer = Muon([h[i] for h in halves], lr=0.02)
        for step in range(3):
            give_grads([h[i] for h in halves], [g.chunk(2)[i] for g in matrices(step + 1)])
            optimizer.step()
    with pytest.raises(AssertionError):
        assert_same([torch.cat([h.detach() for h in pair]) for pair in halves], expected)
    update = newton_schulz(matrices(5)[0], TABLES["jordan"]).float()
    local = torch.cat([newton_schulz(half, TABLES["jordan"]).float() for half in matrices(5)[0].chunk(2)])
    assert torch.cosine_similarity(update.flatten(), local.flatten(), dim=0) < 0.97


def test_stacks_heads_and_convolutions_are_their_matrices() -> None:
    shapes = [(3, 16, 24), (32, 24), (8, 3, 5, 5)]
    values = matrices(0, shapes)
    groups = [{}, {"split_rows": (16, 8, 8), "heads": 4}, {}]
    parts = [*values[0], *values[1].split(8), values[2].view(8, 75)]
    expected = [nn.Parameter(part.clone()) for part in parts]
    oracle = torch.optim.Muon(expected, lr=0.02, adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        grads = matrices(step + 1, shapes)
        give_grads(expected, [*grads[0], *grads[1].split(8), grads[2].view(8, 75)])
        oracle.step()
    whole = [torch.stack(expected[:3]), torch.cat(expected[3:7]), expected[7].view(8, 3, 5, 5)]

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        lay: Lay = lambda i, shape: [[RaggedShard((0, 1), (20, 0, 28)), rows_of(32, 3), Shard(0)][i]]  # noqa: E731
        params = sharded(values, mesh, lay)
        optimizer = Muon([{"params": [p], **g} for p, g in zip(params, groups, strict=True)], lr=0.02)
        for step in range(2):
            give_grads(params, matrices(step + 1, shapes))
            optimizer.step()
        assert_same(params, whole)

    run_ranks(run, 3)


def test_state_is_there_before_the_first_step() -> None:
    param = nn.Parameter(torch.zeros(6, 4))
    state = Muon([("w", param)], row_norm_beta2=0.95).state[param]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "momentum_buffer": (6, 4),
        "row_variance": (6, 1),
    }


@pytest.mark.parametrize("missing", ["symmetric", "agree"])
def test_a_parameter_without_gradient_stays_as_it_is(missing: str) -> None:
    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0), mesh, lambda i, shape: placements_of(i, shape, world_size))
        optimizer = Muon(params, lr=0.02, missing_grads=missing)
        oracle = [nn.Parameter(v) for v in matrices(0)]
        reference = torch.optim.Muon(oracle, lr=0.02, adjust_lr_fn="match_rms_adamw")
        for absent in (1, None, 0):
            give_grads(params, matrices(1))
            give_grads(oracle, matrices(1))
            if absent is not None:
                params[absent].grad = oracle[absent].grad = None
            optimizer.step()
            reference.step()
        assert_same(params, oracle)

    run_ranks(run, 3)


def test_a_gradient_on_some_ranks_only_counts_as_zero_elsewhere() -> None:
    """For Muon and, in the same optimizer, for AdamW: momentum, decay and step count of all ranks go on."""
    shapes = [(8, 6), (8, 6)]
    grads = [grad.index_fill(0, torch.arange(4, 8), 0.0) for grad in matrices(1, shapes)]
    whole = [nn.Parameter(v) for v in matrices(0, shapes)]
    oracles = [
        torch.optim.Muon(whole[:1], lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(whole[1:], lr=0.02, weight_decay=0.1),
    ]
    for _ in range(2):
        give_grads(whole, grads)
        for oracle in oracles:
            oracle.step()

    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0, shapes), mesh, lambda i, shape: [Shard(0)])
        groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
        optimizer = Muon(groups, lr=0.02, missing_grads="agree", placement="owner")
        for _ in range(2):
            give_grads(params, grads)
            if rank == 1:
                params[0].grad = params[1].grad = None
            optimizer.step()
        assert_same(params, whole)

    run_ranks(run, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20, bias=False), nn.Linear(20, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("blocks", [None, Blocks(), Blocks.elements(), Blocks.whole()])
def test_a_sharded_model_accumulates_clips_and_then_steps_once(blocks: Blocks | None) -> None:
    """The clip factor comes before Newton and Schulz, which sees the sum of the micro-batches."""

    def run(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        whole, model = Net(), Net()
        model.load_state_dict(whole.state_dict())
        fully_shard(model, shard_placement_fn=lambda param: blocks)
        optimizer = Muon(model.named_parameters(), lr=0.02)
        reference = torch.optim.Muon(whole.parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw")
        train_clipped(model, optimizer, whole, reference, num_steps=2, batch_shape=(4, 12))
        for got, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor(), expected, rtol=0, atol=1e-4)

    for world_size in (2, 3):
        run_ranks(run, world_size)


def test_schedulers_closures_and_tensor_learning_rates() -> None:
    params = [nn.Parameter(v) for v in matrices(0, [(8, 6)])]
    whole = [nn.Parameter(v) for v in matrices(0, [(8, 6)])]
    optimizer = Muon(params, lr=torch.tensor(0.02))
    reference = torch.optim.Muon(whole, lr=torch.tensor(0.02), adjust_lr_fn="match_rms_adamw")
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, reference)]
    for step in range(3):
        give_grads(params, matrices(step, [(8, 6)]))
        give_grads(whole, matrices(step, [(8, 6)]))
        assert optimizer.step(lambda: 7.0) == 7.0
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert_same(params, whole)


def test_ranks_that_planned_differently_are_told_the_parameter() -> None:
    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        params = sharded(matrices(0), mesh, lambda i, shape: [Shard(0)])
        named = [(f"w{i}", p) for i, p in enumerate(params)]
        split = {"heads": 2} if rank == 1 else {}
        optimizer = Muon([{"params": named[:1]}, {"params": named[1:2], **split}], placement="owner")
        give_grads(params, matrices(1))
        optimizer.step()

    errors_on_all_ranks(run, 2, PlanMismatchError, "optimizer step", "param 'w1")


def test_a_gradient_laid_out_otherwise_is_refused_by_name() -> None:
    def run(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        (param,) = sharded(matrices(0, [(8, 6)]), mesh, lambda i, shape: [Shard(0)])
        optimizer = Muon([("w", param)])
        param.grad = distribute_tensor(matrices(1, [(8, 6)])[0], mesh, [Shard(1)])
        optimizer.step()

    errors_on_all_ranks(run, 2, ValueError, "param 'w': expected its gradient to lie", "Shard(dim=1)")


def test_the_defaults_are_torchs() -> None:
    own, stock = MuonAlgorithm().defaults, torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).defaults
    for name in ("lr", "weight_decay", "momentum", "nesterov"):
        assert own[name] == stock[name]
    assert TABLES["jordan"] == (stock["ns_coefficients"],) * stock["ns_steps"]
