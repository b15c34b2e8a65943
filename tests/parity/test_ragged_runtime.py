"""What only ragged units can do wrong: wishes of every kind in one unit, budgets, stock tools, checkpoints.

The rest of the parity suite runs over ragged shards too (`both_layouts` in conftest.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from shardkit import (
    Blocks,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    RaggedShard,
    RaggedTensor,
    clip_grad_norm_,
    fully_shard,
)
from shardkit.checkpoint import set_model_state_dict, set_optimizer_state_dict
from shardkit.errors import PaddingError
from tests.parity.test_kinds import Bag, bag_loss, randn
from tests.support.models import CASES, MLP, Case, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import errors_on_all_ranks, run_ranks

Wish = Shard | Blocks | None
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def flat(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def grid(replicate: int, world_size: int) -> DeviceMesh:
    shape = (replicate, world_size // replicate)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def rows(param: nn.Parameter) -> Blocks:
    return Blocks()


def matrices(param: nn.Parameter) -> Blocks | None:
    """Matrices ragged, in blocks of two rows; the others as Shard(0)."""
    return Blocks(2) if param.ndim > 1 else None


# ---------------------------------------------------------------- wishes of every kind in one unit


def wishes(world_size: int) -> list[tuple[nn.Parameter, Wish]]:
    """Parameters of many shapes, dtypes and wishes; some frozen, some empty, one of a single element.

    Sums of three or more gradients in bfloat16 depend on the order: that one is frozen then.
    """
    frozen = {"trained": False}
    return [
        (randn(7, 5), Blocks(2)),
        (randn(7, 3), Shard(0)),
        (randn(3, 12), Shard(1)),
        (randn(5, 3), Blocks.elements()),
        (randn(4, 6), Blocks.whole()),
        (randn(3, 5, 2), Blocks(2)),
        (randn(3, 4, 2), Blocks.whole()),
        (randn(5, 2, 3, 3), Blocks()),
        (randn(9), Blocks()),
        (randn(9), None),
        (randn(1), Blocks()),
        (randn(0, 4), Blocks()),
        (randn(6, 5, **frozen), Blocks(3)),
        (randn(6, 2, **frozen), None),
        (randn(6, 5, dtype=torch.bfloat16, trained=world_size <= 2), Blocks(4)),
        (randn(5, 5, dtype=torch.float64), Blocks(3, required=False)),
        (randn(8, 4, dtype=torch.uint8, **frozen), Blocks(4)),
    ]


def bag(world_size: int) -> Bag:
    return Bag(*(param for param, _ in wishes(world_size)))


def sharded_bag(world_size: int, **options: object) -> Bag:
    model = bag(world_size)
    of_param = {id(param): wish for param, (_, wish) in zip(model.params, wishes(world_size), strict=True)}
    return fully_shard(model, shard_placement_fn=lambda param: of_param[id(param)], **options)


def num_rows_together(wish: Blocks, shape: tuple[int, ...]) -> int:
    """Rows of a matrix between two cuts; elements where it is cut anywhere."""
    of_matrix = shape[1] if len(shape) == 3 else shape[0]
    return of_matrix if wish.cut == "matrices" else min(wish.rows, of_matrix)


def assert_no_block_is_cut(param: RaggedTensor, wish: Blocks) -> None:
    """By the units of its layout, every boundary lies between two blocks."""
    (placement,) = (p for p in param.placements if isinstance(p, RaggedShard))
    if param.ndim < 2 or wish.cut == "elements":
        return
    of_matrix = param.shape[1] if param.ndim == 3 else param.shape[0]
    row_numel = math.prod(param.shape[2:] if param.ndim == 3 else param.shape[1:])
    end = 0
    for numel in placement.local_numels(param.shape)[:-1]:
        end += numel
        assert end % row_numel == 0, f"{wish} of {tuple(param.shape)} is cut inside a row by {placement}"
        if end < param.numel():
            row = end // row_numel % of_matrix
            assert row % num_rows_together(wish, tuple(param.shape)) == 0, f"{wish} is cut by {placement}"


BAG_RUNS: list[tuple[int, Callable[[int], DeviceMesh]]] = [
    (1, flat),
    (2, flat),
    (3, flat),
    (2, lambda world_size: grid(2, world_size)),
    (4, lambda world_size: grid(2, world_size)),
]


@pytest.mark.parametrize(("world_size", "mesh"), BAG_RUNS)
def test_wishes_of_every_kind_share_a_unit(world_size: int, mesh: Callable[[int], DeviceMesh]) -> None:
    """Also with frozen, empty and integer parameters, offloaded, and in bfloat16."""

    def check(rank: int, world_size: int) -> None:
        for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"mp_policy": BF16}):
            model = sharded_bag(world_size, mesh=mesh(world_size), **options)
            for param, (full, wish) in zip(model.params, wishes(world_size), strict=True):
                assert torch.equal(param.full_tensor(), full)
                assert isinstance(param, RaggedTensor) == isinstance(wish, Blocks)
                if isinstance(wish, Blocks):
                    assert_no_block_is_cut(param, wish)
            dtypes = {}
            if "mp_policy" in options:
                dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            grads = oracle_grads(bag(world_size), bag_loss, world_size, **dtypes)
            for _ in range(2):
                model.zero_grad()
                bag_loss(model, rank).backward()
                assert_grads_equal(model, grads, world_size)

    run_ranks(check, world_size)


def test_a_whole_matrix_lies_on_one_rank() -> None:
    def check(rank: int, world_size: int) -> None:
        model = MLP(7, 13, 5, 3)
        fully_shard(model, shard_placement_fn=lambda param: Blocks.whole())
        holders = set()
        for layer in model.layers:
            (placement,) = layer.weight.placements
            held = [index for index, units in enumerate(placement.local_units) if units]
            assert len(held) == 1, f"{placement} divides a matrix"
            holders |= set(held)
            expected = tuple(layer.weight.shape) if rank in held else (0, layer.weight.shape[1])
            assert layer.weight.to_local().shape == expected
        assert len(holders) > 1, "one rank has everything"
        output = model(normal_batch(rank, 4, 7))
        output.square().mean().backward()

    run_ranks(check, 3)


def test_a_unit_of_several_modules_is_planned_as_one() -> None:
    """Two layers of one class, whose parameters have the same names."""

    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(normal_batch(rank, 4, 7)).square().mean()

    def check(rank: int, world_size: int) -> None:
        model = build()
        fully_shard([model[0], model[2]], shard_placement_fn=rows)
        fully_shard(model, shard_placement_fn=rows)
        assert len(fully_shard.state(model[0]).unit.buckets) == 1
        grads = oracle_grads(build(), loss, world_size)
        for _ in range(2):
            model.zero_grad()
            loss(model, rank).backward()
            assert_grads_equal(model, grads, world_size)

    run_ranks(check, 3)


def test_the_gathered_parameters_are_one_allocation() -> None:
    def check(rank: int, world_size: int) -> None:
        model = MLP(7, 13, 5, 3)
        fully_shard(model, shard_placement_fn=rows)
        model.unshard()
        storages = {param.untyped_storage().data_ptr() for param in model.parameters()}
        (bucket,) = fully_shard.state(model).unit.buckets
        assert len(storages) == 1
        assert next(model.parameters()).untyped_storage().nbytes() == 4 * bucket.spec.layout.numel
        model.reshard()
        assert bucket.gather.unsharded.flat.untyped_storage().nbytes() == 0

    run_ranks(check, 2)


# ---------------------------------------------------------------- the padding budget


def wide() -> nn.Module:
    return nn.Linear(512, 384, bias=False)  # of 256 rows and of 128: a rank has to hold the first


def test_required_blocks_that_waste_too_much_are_refused_on_every_rank() -> None:
    def check(rank: int, world_size: int) -> None:
        fully_shard(wide(), shard_placement_fn=lambda param: Blocks(256))

    errors_on_all_ranks(
        check, 2, PaddingError, "'weight'", "33.33 %", "required=False", "smaller blocks", "a larger unit"
    )


def test_preferred_blocks_fall_to_a_divisor_within_the_budget() -> None:
    def check(rank: int, world_size: int) -> None:
        model = wide()
        fully_shard(model, shard_placement_fn=lambda param: Blocks(256, required=False))
        assert model.weight.placements == (RaggedShard((0,), (192, 192), block=64),)
        model(normal_batch(rank, 2, 512)).square().mean().backward()
        assert model.weight.grad.placements == model.weight.placements

    run_ranks(check, 2)


# ---------------------------------------------------------------- optimizers, clipping, scaling

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "default": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3, fused=True),
}


def sharded(case: Case, place: Callable[[nn.Parameter], Wish], **options: object) -> nn.Module:
    return case.sharded(fully_shard, shard_placement_fn=place, **options)


def train_reference(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, first_rank: int, world_size: int
) -> Tensor:
    """One clipped step on the batches of ranks `first_rank` to `first_rank + world_size`; the norm."""
    grads = oracle_grads(model, lambda m, r: case.loss(m, first_rank + r), world_size)
    for name, param in model.named_parameters():
        param.grad = grads.get(name)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


def train(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, number: int) -> Tensor:
    """One clipped step of a sharded model on the batch of that number."""
    optimizer.zero_grad()
    case.loss(model, number).backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


def assert_params_close(model: nn.Module, reference: nn.Module) -> None:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        full = param.detach().full_tensor()
        torch.testing.assert_close(full, expected.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("place", [rows, matrices])
@pytest.mark.parametrize("world_size", [2, 3])
def test_stock_optimizers_step_as_in_one_process(
    world_size: int, place: Callable[[nn.Parameter], Wish]
) -> None:
    case = CASES["transformer"]

    def check(rank: int, world_size: int) -> None:
        for name, make in OPTIMIZERS.items():
            model, reference = sharded(case, place), case.build()
            optimizer, expected = make(model), make(reference)
            for step in range(2):
                norm = train(model, optimizer, case, rank + 10 * step)
                expected_norm = train_reference(reference, expected, case, 10 * step, world_size)
                torch.testing.assert_close(norm, expected_norm, msg=name)
            assert_params_close(model, reference)

    run_ranks(check, world_size)


def test_torchs_own_clipping_takes_both_layouts_at_once() -> None:
    case = CASES["transformer"]

    def check(rank: int, world_size: int) -> None:
        model, reference = sharded(case, matrices), case.build()
        case.loss(model, rank).backward()
        grads = oracle_grads(reference, case.loss, world_size)
        for name, param in reference.named_parameters():
            param.grad = grads[name]
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm.full_tensor(), expected)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)

    run_ranks(check, 3)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_one_ranks_rows_skips_the_step_on_all(fused: bool) -> None:
    def check(rank: int, world_size: int) -> None:
        model = MLP(7, 13, 5, 3)
        fully_shard(model, shard_placement_fn=rows)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for overflows, scale in ((True, 4.0), (False, 4.0)):
            before = [param.full_tensor().detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(model(normal_batch(rank, 4, 7)).square().mean()).backward()
            last = model.layers[2].bias.grad.to_local()
            if overflows:
                last.fill_(math.inf)  # empty on all ranks but the last
            scaler.step(optimizer)
            scaler.update()
            stepped = [
                not torch.equal(param.full_tensor(), old)
                for param, old in zip(model.parameters(), before, strict=True)
            ]
            assert stepped == [not overflows] * len(before)
            assert scaler.get_scale() == scale

    run_ranks(check, 3)


# ---------------------------------------------------------------- what users replace


def test_a_state_dict_holds_ragged_tensors_that_stay_live() -> None:
    case = CASES["transformer"]

    def check(rank: int, world_size: int) -> None:
        model = sharded(case, rows)
        state = model.state_dict()
        assert list(state) == list(case.build().state_dict())
        assert all(isinstance(value, RaggedTensor) for value in state.values())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        case.loss(model, rank).backward()
        optimizer.step()
        for name, param in model.named_parameters():
            assert torch.equal(state[name].full_tensor(), param.full_tensor()), f"{name} is not live"
        other = sharded(case, rows)
        other.load_state_dict(state)
        again = sharded(case, rows)
        again.load_state_dict(copy.deepcopy(state), assign=True)
        losses = [case.loss(m, rank).detach() for m in (model, other, again)]
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[0], losses[2])

    run_ranks(check, 2)


def test_a_broadcast_state_dict_fills_a_model_on_meta() -> None:
    case = CASES["transformer"]

    def check(rank: int, world_size: int) -> None:
        with torch.device("meta"):
            model = case.make()
        for module in [*case.units(model), model]:
            fully_shard(module, shard_placement_fn=matrices)
        full = case.build().state_dict() if rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, full, options=options)
        grads = oracle_grads(case.build(), case.loss, world_size)
        for _ in range(2):
            model.zero_grad()
            case.loss(model, rank).backward()
            assert_grads_equal(model, grads, world_size)

    run_ranks(check, 3)


# ---------------------------------------------------------------- checkpoints between layouts


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)


PLACES: dict[str, Callable[[nn.Parameter], Wish] | None] = {"rows": None, "ragged": rows, "mixed": matrices}
ROUTES = [
    (2, "ragged", 3, "rows"),
    (3, "rows", 2, "ragged"),
    (3, "ragged", 2, "mixed"),
    (2, "mixed", 1, "rows"),
]


@pytest.mark.parametrize(("saved_by", "saved_as", "loaded_by", "loaded_as"), ROUTES)
def test_training_continues_in_another_layout(
    tmp_path: Path, saved_by: int, saved_as: str, loaded_by: int, loaded_as: str
) -> None:
    """Through a sharded checkpoint with the optimizer's state, on another number of ranks."""
    case = CASES["transformer"]
    reference = case.build()
    expected = adamw(reference)
    train_reference(reference, expected, case, 0, saved_by)

    def save(rank: int, world_size: int) -> None:
        model = sharded(case, PLACES[saved_as])
        optimizer = adamw(model)
        train(model, optimizer, case, rank)
        assert_params_close(model, reference)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)

    def load(rank: int, world_size: int) -> None:
        model = sharded(case, PLACES[loaded_as])
        optimizer = adamw(model)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert_params_close(model, reference)
        train_reference(reference, expected, case, 10, world_size)
        train(model, optimizer, case, 10 + rank)
        assert_params_close(model, reference)

    run_ranks(save, saved_by)
    run_ranks(load, loaded_by)


def test_full_state_dicts_carry_training_from_one_layout_to_another() -> None:
    """Gathered by torch's functions on rank 0, and broadcast from there by ours."""
    case = CASES["transformer"]

    def check(rank: int, world_size: int) -> None:
        reference = case.build()
        expected = adamw(reference)
        train_reference(reference, expected, case, 0, world_size)
        train_reference(reference, expected, case, 10, world_size)
        for source, target in ((rows, matrices), (matrices, None), (None, rows)):
            model = sharded(case, source)
            optimizer = adamw(model)
            train(model, optimizer, case, rank)
            out = StateDictOptions(full_state_dict=True, cpu_offload=True)
            model_state = get_model_state_dict(model, options=out)
            optimizer_state = get_optimizer_state_dict(model, optimizer, options=out)
            into = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            model = sharded(case, target)
            optimizer = adamw(model)
            set_model_state_dict(model, model_state, options=into)
            set_optimizer_state_dict(model, optimizer, optimizer_state, options=into)
            train(model, optimizer, case, 10 + rank)
            assert_params_close(model, reference)

    run_ranks(check, 3)
