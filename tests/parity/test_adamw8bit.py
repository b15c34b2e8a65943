"""AdamW8bit under every sharding against itself on one process: parameters and state to the bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit import Blocks, RaggedShard, RaggedTensor, fully_shard
from shardkit.boxes import Layout, local_part
from shardkit.optim import AdamW8bit
from tests.support.ranks import errors_on_all_ranks, run_ranks

SHAPES = {
    "rows": (37, 600),
    "uneven": (33, 256),
    "few": (3, 2048),
    "copies": (20, 300),
    "bias": (5,),
    "elements": (13, 7),
    "stack": (3, 8, 256),
    "columns": (2, 15360),
    "filters": (24, 8, 5, 5),
    "tiles": (300, 200),
    "bf16": (20, 300),
}
CUTS = {1: (1,), 2: (3, 1), 3: (2, 0, 3), 4: (0, 2, 0, 3), 5: (1, 0, 2, 0, 1)}
TILES = {1: (300,), 2: (256, 44), 3: (128, 0, 172), 4: (0, 256, 0, 44), 5: (128, 128, 0, 44, 0)}


def spread(total: int, world_size: int) -> tuple[int, ...]:
    """`total` units over the ranks, unevenly and with empty shares."""
    weights = CUTS[world_size]
    units = [total * weight // sum(weights) for weight in weights]
    units[units.index(max(units))] += total - sum(units)
    return tuple(units)


def placements(world_size: int) -> dict[str, Placement]:
    rows = {
        name: RaggedShard((0,), spread(SHAPES[name][0], world_size)) for name in ("rows", "filters", "bf16")
    }
    return rows | {
        "uneven": Shard(0),
        "few": Shard(0),
        "copies": Replicate(),
        "bias": Shard(0),
        "elements": RaggedShard((0, 1), spread(91, world_size)),
        "stack": RaggedShard((0, 1), spread(24, world_size)),
        "columns": Shard(1),
        "tiles": RaggedShard((0,), TILES[world_size], block=128),
    }


def laid_out(full: Tensor, mesh: DeviceMesh, placed: tuple[Placement, ...]) -> DTensor:
    layout = Layout(tuple(full.shape), tuple(mesh.shape), placed)
    local = local_part(full, layout, tuple(mesh.get_coordinate()))
    kind = RaggedTensor if any(isinstance(p, RaggedShard) for p in placed) else DTensor
    return kind.from_local(local, mesh, placed, shape=full.shape, stride=full.stride())


def value(name: str, seed: int) -> Tensor:
    """Numbers whose rows differ in size; `bf16` is bfloat16."""
    generator = torch.Generator().manual_seed(1000 * seed + list(SHAPES).index(name))
    shape = SHAPES[name]
    made = torch.randn(shape, generator=generator)
    made *= torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator).exp()
    return made.bfloat16() if name == "bf16" else made


class Model(nn.Module):
    """One parameter of every layout, or all of them plain."""

    def __init__(self, world_size: int | None) -> None:
        super().__init__()
        self.mesh = None if world_size is None else init_device_mesh("cpu", (world_size,))
        self.placed = {} if world_size is None else placements(world_size)
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(self.lay(name, value(name, 0))))

    def lay(self, name: str, full: Tensor) -> Tensor:
        return full if self.mesh is None else laid_out(full, self.mesh, (self.placed[name],))

    def set_grads(self, step: int) -> None:
        for name, param in self.named_parameters():
            param.grad = self.lay(name, value(name, step))

    def optimizer(self, **settings: object) -> AdamW8bit:
        named = dict(self.named_parameters())
        bf16 = [("bf16", named.pop("bf16"))]
        tiles = [("tiles", named.pop("tiles"))]
        groups = [
            {"params": list(named.items()), **settings},
            {"params": tiles, "tile": (128, 128)},
            {"params": bf16, "stochastic_rounding": True, "seed": 7},
        ]
        return AdamW8bit(groups, lr=1e-2)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(model: Model, optimizer: AdamW8bit) -> dict[str, Tensor]:
    """Full parameters and full state, by name."""
    found = {name: whole(param) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": whole(state) for key, state in optimizer.state[param].items()}
    return found


def train(world_size: int | None, num_steps: int, **settings: object) -> dict[str, Tensor]:
    model = Model(world_size)
    optimizer = model.optimizer(**settings)
    for step in range(1, num_steps + 1):
        model.set_grads(step)
        optimizer.step()
    return everything(model, optimizer)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different, different


@pytest.mark.parametrize(
    "settings", [{}, {"bits": 4}, {"format": "e4m3"}, {"second_moment": "sqrt"}], ids=str
)
def test_any_number_of_ranks_gives_what_one_process_gives(settings: dict[str, object]) -> None:
    expected = train(None, 3, **settings)
    assert expected["rows.exp_avg_scales"].shape == (37, 3)
    assert expected["tiles.exp_avg_scales"].shape == (3, 2)
    assert expected["bf16"].dtype == torch.bfloat16 and "elements.exp_avg" in expected
    for world_size in (1, 2, 3, 4, 5):
        run_ranks(lambda rank, size: assert_same(train(size, 3, **settings), expected), world_size)


def continue_training(rank: int, world_size: int, folder: Path, first: int, last: int) -> dict[str, Tensor]:
    model = Model(world_size)
    optimizer = model.optimizer(bits=4)
    if first > 1:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder / str(first - 1))
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in range(first, last + 1):
        model.set_grads(step)
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / str(last))
    return everything(model, optimizer)


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_moves_between_numbers_of_ranks_is_one_run(tmp_path: Path) -> None:
    for world_size, last in zip((2, 4, 3, 2, 1), itertools.count(2, 2), strict=False):
        (got, *_) = run_ranks(continue_training, world_size, tmp_path, last - 1, last)
        assert_same(got, train(None, last, bits=4))


def on_two_axes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placed in (
        (Replicate(), Shard(0)),
        (Replicate(), RaggedShard((0,), (30, 3))),
        (RaggedShard((0,), (10, 7) if mesh.get_coordinate()[1] == 0 else (6, 10)), Shard(0)),
        (Shard(0), Shard(1)),
    ):
        full = value("uneven", 0).repeat(1, 2)
        sharded, plain = nn.Parameter(laid_out(full, mesh, placed)), nn.Parameter(full)
        ours, oracle = AdamW8bit([sharded], lr=1e-2), AdamW8bit([plain], lr=1e-2)
        for step in (1, 2):
            grad = value("uneven", step).repeat(1, 2)
            sharded.grad, plain.grad = laid_out(grad, mesh, placed), grad
            ours.step()
            oracle.step()
        layout, me = Layout(tuple(full.shape), (2, 2), placed), tuple(mesh.get_coordinate())
        assert torch.equal(sharded.to_local(), local_part(plain.detach(), layout, me)), placed


def test_two_mesh_axes_give_what_one_process_gives() -> None:
    run_ranks(on_two_axes, 4)


def trained_weights(rank: int, world_size: int, ragged: bool, tp: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 96), nn.Tanh(), nn.Linear(96, 256))
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh["dp"], shard_placement_fn=(lambda p: Blocks()) if ragged else None)
    optimizer = AdamW8bit(model.named_parameters(), lr=1e-2, block=48)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        model(torch.randn(8, 256, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [whole(param) for param in model.parameters()]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("ragged", [False, True])
def test_models_of_fully_shard_train_as_on_one_process(ragged: bool, tp: int) -> None:
    (expected,) = run_ranks(trained_weights, 1, False, 1)
    for got in run_ranks(trained_weights, 2 * tp, ragged, tp):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
            assert (a - b).norm() < 1e-2 * b.norm()


def test_cut_rows_are_refused_on_every_rank_by_name() -> None:
    def cut_inside_rows(rank: int, world_size: int) -> None:
        placed = (RaggedShard((0, 1), (4097, 33 * 256 - 4097)),)
        weight = nn.Parameter(laid_out(value("uneven", 0), init_device_mesh("cpu", (2,)), placed))
        AdamW8bit([("layers.0.weight", weight)])

    def cut_inside_blocks(rank: int, world_size: int) -> None:
        placed = (Shard(1),)
        weight = nn.Parameter(laid_out(value("uneven", 0), init_device_mesh("cpu", (2,)), placed))
        AdamW8bit([("layers.0.weight", weight)])

    def cut_inside_tiles(rank: int, world_size: int) -> None:
        weight = nn.Parameter(laid_out(value("tiles", 0), init_device_mesh("cpu", (2,)), (Shard(0),)))
        AdamW8bit([("layers.0.weight", weight)], tile=(128, 128))

    words = ("'layers.0.weight'", "two ranks", "min_numel")
    errors_on_all_ranks(cut_inside_rows, 2, ValueError, *words, "Blocks()")
    errors_on_all_ranks(cut_inside_blocks, 2, ValueError, *words, "Shard(dim=1)")
    errors_on_all_ranks(cut_inside_tiles, 2, ValueError, *words, "Blocks(128)")


def test_tiles_cut_by_two_axes_and_misplaced_gradients_are_refused() -> None:
    def two_axes(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1))
        weight = nn.Parameter(laid_out(value("tiles", 0), mesh, (Shard(0), Shard(0))))
        AdamW8bit([("w", weight)], tile=(128, 128))

    def misplaced(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(laid_out(value("uneven", 0), mesh, (Shard(0),)))
        weight.grad = laid_out(value("uneven", 0), mesh, (Replicate(),))
        AdamW8bit([("w", weight)]).step()

    errors_on_all_ranks(two_axes, 2, NotImplementedError, "'w'", "two mesh axes")
    errors_on_all_ranks(misplaced, 2, ValueError, "'w'", "Redistribute")
