"""Checkpoints between layouts and world sizes, and full state dicts in and out, against the full tensors."""

from __future__ import annotations

import weakref
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict import (
    set_model_state_dict as set_stock_model_state_dict,
)
from torch.distributed.checkpoint.state_dict import (
    set_optimizer_state_dict as set_sharded_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardkit import Blocks, fully_shard
from shardkit.checkpoint import full_state, set_model_state_dict, set_optimizer_state_dict
from shardkit.placement import RaggedShard
from shardkit.ragged import RaggedTensor, distribute_tensor
from tests.parity.ragged_layouts import values
from tests.support.ranks import run_ranks

ROWS = {1: (5,), 2: (1, 4), 3: (4, 0, 1), 4: (0, 2, 0, 3)}
ELEMENTS = {1: (15,), 2: (4, 11), 3: (7, 0, 8), 4: (0, 1, 9, 5)}
STACK = {1: (24,), 2: (5, 19), 3: (2, 22, 0), 4: (0, 13, 10, 1)}


def _layouts(world_size: int) -> dict[str, Placement]:
    return {
        "rows": RaggedShard((0,), ROWS[world_size]),
        "elements": RaggedShard((0, 1), ELEMENTS[world_size]),
        "shard": Shard(0),
        "columns": Shard(1),
        "replicate": Replicate(),
    }


def _save(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {
        name: distribute_tensor(values((5, 3), 1), mesh, [placement])
        for name, placement in _layouts(world_size).items()
    }
    state["stack"] = distribute_tensor(
        values((2, 3, 4), 2), mesh, [RaggedShard((0, 1, 2), STACK[world_size])]
    )
    state["vector"] = distribute_tensor(values((5,), 3), mesh, [RaggedShard((0,), ROWS[world_size])])
    state["scalar"] = distribute_tensor(values((), 4), mesh, [RaggedShard((), (*[0] * (world_size - 1), 1))])
    if world_size == 4:
        grid = init_device_mesh("cpu", (2, 2))
        state["grid"] = distribute_tensor(values((6, 4), 5), grid, [RaggedShard((0,), (1, 2)), Shard(0)])
        state["hsdp"] = distribute_tensor(
            values((6, 4), 6), grid, [Replicate(), RaggedShard((0, 1), (7, 17))]
        )
    dcp.save(state, checkpoint_id=folder / str(world_size))


def _load(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for saved_by in (1, 2, 3, 4):
        for wanted, placement in _layouts(world_size).items():
            state = {
                name: distribute_tensor(torch.zeros(5, 3).double(), mesh, [placement]) for name in _layouts(1)
            }
            dcp.load(state, checkpoint_id=folder / str(saved_by))
            for name, tensor in state.items():
                got = tensor.full_tensor()
                assert torch.equal(got, values((5, 3), 1)), f"{name} of {saved_by} ranks as {wanted}"
        others = {
            "stack": distribute_tensor(
                torch.zeros(2, 3, 4).double(), mesh, [RaggedShard((0, 1, 2), STACK[world_size][::-1])]
            ),
            "vector": distribute_tensor(
                torch.zeros(5).double(), mesh, [RaggedShard((0,), ROWS[world_size][::-1])]
            ),
            "scalar": distribute_tensor(
                torch.zeros(()).double(), mesh, [RaggedShard((), (1, *[0] * (world_size - 1)))]
            ),
        }
        grids = {"grid": values((6, 4), 5), "hsdp": values((6, 4), 6)} if saved_by == 4 else {}
        units = RaggedShard((0, 1), (24, *[0] * (world_size - 1)))
        others |= {name: distribute_tensor(torch.zeros_like(t), mesh, [units]) for name, t in grids.items()}
        dcp.load(others, checkpoint_id=folder / str(saved_by))
        expected = {"stack": values((2, 3, 4), 2), "vector": values((5,), 3), "scalar": values((), 4)} | grids
        for name, tensor in others.items():
            assert torch.equal(tensor.full_tensor(), expected[name]), f"{name} of {saved_by} ranks"


@pytest.mark.filterwarnings("ignore")
def test_any_layout_of_any_world_size_loads_into_any_other(tmp_path):
    for world_size in (1, 2, 3, 4):
        run_ranks(_save, world_size, tmp_path)
    for world_size in (1, 2, 3, 4):
        run_ranks(_load, world_size, tmp_path)


class WithoutElements(torch.nn.Module):
    """Parameters that hold nothing beside one that does, as code with optional parts has them."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.vector, self.rows, self.columns = (
            torch.nn.Parameter(torch.zeros(shape)) for shape in ((0,), (0, 4), (3, 0))
        )
        self.weight = torch.nn.Parameter(torch.full((5, 3), fill))

    def forward(self) -> torch.Tensor:
        return sum(parameter.sum() for parameter in self.parameters())


def _without_elements(
    rank: int, world_size: int, folder: Path, wish: Blocks | None, saved: list[str]
) -> None:
    """Save as `{wish}{world_size}` and load all of `saved`, optimizer state included."""

    def trained(fill: float) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, object]]:
        model = fully_shard(WithoutElements(fill), shard_placement_fn=lambda param: wish)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model().backward()
        optimizer.step()
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        return model, optimizer, state

    if not saved:
        dcp.save(trained(2.0)[2], checkpoint_id=folder / f"{wish}{world_size}")
    for name in saved:
        model, optimizer, state = trained(7.0)
        dcp.load(state, checkpoint_id=folder / name)
        set_model_state_dict(model, state["model"])
        set_sharded_optimizer_state_dict(model, optimizer, state["optim"])
        assert torch.equal(model.weight.full_tensor(), trained(2.0)[0].weight.full_tensor()), name
        for parameter in model.parameters():
            assert parameter.full_tensor().shape == parameter.shape, name
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape, name


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_elements_are_saved_and_loaded(tmp_path):
    wishes, world_sizes = (Blocks(), None), (1, 2, 3, 4)
    for wish, world_size in product(wishes, world_sizes):
        run_ranks(_without_elements, world_size, tmp_path, wish, [])
    saved = [f"{wish}{world_size}" for wish, world_size in product(wishes, world_sizes)]
    for wish, world_size in product(wishes, world_sizes):
        run_ranks(_without_elements, world_size, tmp_path, wish, saved)


class Model(torch.nn.Module):
    """Two ragged parameters, a stock-sharded one, a plain one, a buffer."""

    def __init__(self, world_size: int, seed: int, device: str = "cpu") -> None:
        super().__init__()
        mesh, rows = init_device_mesh("cpu", (world_size,)), ROWS[world_size]
        cuts = {
            "rows": ((5, 3), RaggedShard((0,), rows)),
            "elements": ((5, 3), RaggedShard((0, 1), ELEMENTS[world_size])),
            "shard": ((8, 2), Shard(0)),
        }
        for index, (name, (shape, placement)) in enumerate(cuts.items()):
            made = distribute_tensor(values(shape, seed + index).to(device), mesh, [placement])
            self.register_parameter(name, torch.nn.Parameter(made))
        self.plain = torch.nn.Parameter(values((4,), seed + 3).to(device))
        self.register_buffer("count", torch.full((2,), float(seed), device=device))

    def full(self) -> dict[str, torch.Tensor]:
        """All tensors, gathered."""
        state = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in state.items()}


def _trained(world_size: int, seed: int, steps: int = 2) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(world_size, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for step in range(steps):
        for index, parameter in enumerate(model.parameters()):
            gradient = values(tuple(parameter.shape), 100 + 10 * step + index)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _full_optimizer_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return {
        f"{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, entries in state.items()
        for key, value in entries.items()
    }


def _assert_states_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def _save_training(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _trained(world_size, 7)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    if rank == 0:
        expected = {"model": model.full()}
    else:
        model.full()
    optimizer_state = _full_optimizer_state(model, optimizer)
    if rank == 0:
        torch.save(expected | {"optim": optimizer_state}, folder / "expected.pt")


def _resume_training(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = _trained(world_size, 50, steps=1)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_sharded_optimizer_state_dict(model, optimizer, state["optim"])
    expected = torch.load(folder / "expected.pt", weights_only=True)
    _assert_states_equal(model.full(), expected["model"])
    _assert_states_equal(_full_optimizer_state(model, optimizer), expected["optim"])


@pytest.mark.filterwarnings("ignore")
def test_training_resumes_on_another_world_size(tmp_path):
    run_ranks(_save_training, 3, tmp_path)
    for world_size in (1, 2, 4):
        run_ranks(_resume_training, world_size, tmp_path)


def _full_out(rank: int, world_size: int) -> None:
    model, optimizer = _trained(world_size, 7)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    expected, expected_optimizer = model.full(), _full_optimizer_state(model, optimizer)
    if rank:
        assert not state
        return
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    _assert_states_equal(state, expected)
    flat = {f"{n}.{k}": v for n, entries in optimizer_state["state"].items() for k, v in entries.items()}
    _assert_states_equal(flat, expected_optimizer)


def test_torchs_own_functions_gather_full_state_dicts():
    run_ranks(_full_out, 3)


def _full_in(rank: int, world_size: int, broadcast: bool, device: str, flatten: bool) -> None:
    source, source_optimizer = _trained(world_size, 7)
    gather = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flatten)
    state = get_model_state_dict(source, options=gather)
    optimizer_state = get_optimizer_state_dict(source, source_optimizer, options=gather)
    if broadcast and rank:
        state, optimizer_state = {}, {}
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=broadcast, flatten_optimizer_state_dict=flatten
    )
    model = Model(world_size, 50, device)
    parameters = list(model.parameters())
    result = set_model_state_dict(model, state, options=options)
    assert result == ([], [])
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    if device == "cpu":
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert isinstance(model.rows, RaggedTensor)
    assert model.rows.requires_grad
    _assert_states_equal(model.full(), source.full())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    assert optimizer.param_groups[0]["lr"] == 0.1
    _assert_states_equal(
        _full_optimizer_state(model, optimizer), _full_optimizer_state(source, source_optimizer)
    )


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("flatten", [False, True])
def test_full_state_dicts_are_loaded_into_every_layout(broadcast, device, flatten):
    run_ranks(_full_in, 3, broadcast, device, flatten)


def _stock_loaders(rank: int, world_size: int) -> None:
    full = Model(world_size, 7).full()
    for device in ("cpu", "meta"):
        for broadcast in (True, False):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            state = dict(full) if rank == 0 or not broadcast else {}
            with pytest.raises(RuntimeError):
                set_stock_model_state_dict(Model(world_size, 50, device), state, options=options)


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_loaders_of_full_state_dicts_fail_rather_than_mislabel():
    run_ranks(_stock_loaders, 3)


def _mismatch(rank: int, world_size: int) -> None:
    model, optimizer = _trained(world_size, 7)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = model.full()
    for change, message in (
        ({"rows": torch.zeros(6, 3)}, r"rows: expected shape \(5, 3\), got \(6, 3\)"),
        ({"rows": None}, "rows: expected, but missing"),
        ({"stranger": torch.zeros(3)}, "stranger: not expected by any rank"),
    ):
        state = {name: tensor for name, tensor in (full | change).items() if tensor is not None}
        with pytest.raises(ValueError, match=message):
            set_model_state_dict(model, state if rank == 0 else {}, options=options)
    if rank == 2:
        model.register_parameter("own", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match="own: expected, but missing"):  # on ranks that do not expect it too
        set_model_state_dict(model, full if rank == 0 else {}, options=options)
    if rank == 2:
        del model.own
    partly = {name: tensor for name, tensor in full.items() if name != "rows"} | {"stranger": torch.zeros(3)}
    loose = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    result = set_model_state_dict(model, partly if rank == 0 else {}, options=loose)
    assert result.missing_keys == ["rows"]
    gathered = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    gathered["state"]["rows"]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"state.rows.exp_avg: expected shape \(5, 3\), got \(2, 2\)"):
        set_optimizer_state_dict(model, optimizer, gathered if rank == 0 else {}, options=options)


def test_a_state_dict_that_does_not_fit_is_refused_on_all_ranks_before_anything_is_sent():
    run_ranks(_mismatch, 3)


def _one_at_a_time(rank: int, world_size: int) -> None:
    """A rank lets go of a full tensor before it receives the next."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Module()
    for index in range(4):
        made = distribute_tensor(torch.zeros(5, 3), mesh, [RaggedShard((0,), ROWS[world_size])])
        model.register_parameter(f"w{index}", torch.nn.Parameter(made))
    received: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    receive = full_state._received

    def counted(value: object, fact: full_state.TensorFacts) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in received))
        whole = receive(value, fact)
        received.append(weakref.ref(whole))
        return whole

    full_state._received = counted
    state = {f"w{index}": torch.ones(5, 3) for index in range(4)} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    assert len(received) == 4
    assert max(alive) <= 1, alive  # gloo's own thread may hold the last one for a moment


def test_no_rank_holds_two_full_tensors_while_loading():
    run_ranks(_one_at_a_time, 3)
