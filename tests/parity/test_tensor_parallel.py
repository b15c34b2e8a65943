"""Tensor parallelism inside, sharding outside: 2 x 2 and replicate 2 x shard 2 x tp 2, beside one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shardkit import Blocks, DataParallelMeshDims, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from shardkit.checkpoint import set_model_state_dict
from shardkit.errors import PaddingError
from tests.parity.ragged_layouts import values
from tests.support.models import normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import errors_on_all_ranks, run_ranks

both_layouts = pytest.mark.usefixtures("both_layouts")


class FeedForward(nn.Module):
    """Two linears that tensor parallelism cuts by columns and by rows, and a norm that it leaves alone."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh())


def plan() -> dict[str, ParallelStyle]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def uneven_plan() -> dict[str, ParallelStyle]:
    """Whole activations between the two, since a cut of five columns does not fit the next layer."""
    return {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }


def build(dim: int = 8, hidden: int = 12) -> nn.Module:
    torch.manual_seed(1)
    return FeedForward(dim, hidden)


def sharded(mesh: DeviceMesh, *dp: str, dim: int = 8, hidden: int = 12, **options: object) -> nn.Module:
    model = build(dim, hidden)
    parallelize_module(model, mesh["tp"], plan() if hidden % 4 == 0 else uneven_plan())
    for module in (model.up, model):
        fully_shard(module, mesh[dp], **options)
    return model


def loss(model: nn.Module, rank: int) -> Tensor:
    return model(normal_batch(rank, 4, 8)).float().square().mean()


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pairs(model: nn.Module, reference: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        yield name, param, expected


def assert_params_close(model: nn.Module, reference: nn.Module) -> None:
    for name, param, expected in pairs(model, reference):
        torch.testing.assert_close(full(param.detach()), expected.detach(), rtol=1e-5, atol=1e-6, msg=name)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, max_norm: float = 0.05) -> Tensor:
    optimizer.zero_grad()
    loss(model, rank).backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm


def train_reference(
    reference: nn.Module, optimizer: torch.optim.Optimizer, number: int, num_batches: int
) -> Tensor:
    grads = oracle_grads(reference, lambda m, r: loss(m, number + r), num_batches)
    for name, param in reference.named_parameters():
        param.grad = grads[name]
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    optimizer.step()
    return norm


# ---------------------------------------------------------------- 2 x 2


@both_layouts
@pytest.mark.parametrize("hidden", [12, 5, 1])
def test_gradients_norms_and_steps_over_two_by_two(hidden: int) -> None:
    """Also where five or one row go to two tp ranks and are then cut again by two."""

    def check(rank: int, world_size: int) -> None:
        mesh = square()
        data_rank = mesh.get_local_rank("shard")
        for setting in (True, False):
            reference = build(hidden=hidden)
            model = sharded(mesh, "shard", hidden=hidden, reshard_after_forward=setting)
            for name, param, expected in pairs(model, reference):
                assert isinstance(param, DTensor)
                assert param.shape == expected.shape
                assert torch.equal(full(param), expected), f"{name} before training"
            loss(model, data_rank).backward()
            # tp adds in another order than one process does
            assert_grads_equal(model, oracle_grads(reference, loss, 2), 4)
            optimizer, reference_optimizer = adamw(model), adamw(reference)
            for step in range(2):
                norm = train(model, optimizer, data_rank + 10 * step)
                expected_norm = train_reference(reference, reference_optimizer, 10 * step, 2)
                torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0.0)
                assert_params_close(model, reference)

    run_ranks(check, 4)


def test_placements_are_those_of_torch() -> None:
    def check(rank: int, world_size: int) -> None:
        warnings.simplefilter("ignore")  # torch warns of views in every forward of a tensor-parallel layer
        mesh = square()
        ours, theirs = sharded(mesh, "shard"), build()
        parallelize_module(theirs, mesh["tp"], plan())
        for module in (theirs.up, theirs):
            torch_fully_shard(module, mesh=mesh["shard"])
        for name, param, other in pairs(ours, theirs):
            assert param.placements == other.placements, name
            assert param.device_mesh == other.device_mesh, name
            assert torch.equal(param.to_local(), other.to_local()), name
        for model in (ours, theirs):
            loss(model, mesh.get_local_rank("shard")).backward()
        for name, param, other in pairs(ours, theirs):
            assert param.grad.placements == other.grad.placements, name
            assert torch.equal(param.grad.to_local(), other.grad.to_local()), name

    run_ranks(check, 4)


@both_layouts
def test_mixed_precision_over_two_by_two() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def check(rank: int, world_size: int) -> None:
        mesh = square()
        model = sharded(mesh, "shard", mp_policy=policy)
        loss(model, mesh.get_local_rank("shard")).backward()
        expected = oracle_grads(build(), loss, 2, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for name, param in model.named_parameters():
            assert param.grad.dtype == torch.float32
            largest = expected[name].abs().max().item()
            torch.testing.assert_close(full(param.grad), expected[name], rtol=0.0, atol=0.02 * largest)

    run_ranks(check, 4)


@both_layouts
@pytest.mark.parametrize("hidden", [12, 5])
def test_full_state_dicts_go_in_and_out(hidden: int) -> None:
    def check(rank: int, world_size: int) -> None:
        model = sharded(square(), "shard", hidden=hidden)
        torch.manual_seed(9)
        new = FeedForward(8, hidden)
        set_model_state_dict(
            model,
            new.state_dict() if rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        for name, param, expected in pairs(model, new):
            assert torch.equal(full(param), expected), name
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert list(state) == (list(new.state_dict()) if rank == 0 else [])
        assert all(torch.equal(value, new.state_dict()[name]) for name, value in state.items())

    run_ranks(check, 4)


@both_layouts
def test_a_checkpoint_continues_on_a_flat_mesh_with_its_optimizer_state(tmp_path: Path) -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = square()
        model, reference = sharded(mesh, "shard", hidden=5), build(hidden=5)
        optimizer, reference_optimizer = adamw(model), adamw(reference)
        train(model, optimizer, mesh.get_local_rank("shard"))
        train_reference(reference, reference_optimizer, 0, 2)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)

        model = fully_shard(FeedForward(8, 5), init_device_mesh("cpu", (4,)))
        optimizer = adamw(model)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert_params_close(model, reference)
        train(model, optimizer, rank + 10)
        train_reference(reference, reference_optimizer, 10, 4)
        assert_params_close(model, reference)

    run_ranks(check, 4)


# ---------------------------------------------------------------- stacks, ragged

# the wish, and the dim that two tp ranks divide, of a stack of experts (E, out, in)
STACKS = {
    "two of three rows": ((4, 5, 3), 1, Blocks(2)),  # (4, 3, 3) is cut between rows, (4, 2, 3) is not
    "two of three rows, on all ranks": ((8, 5, 8), 1, Blocks(2)),
    "elements of one": ((4, 3, 1), 1, Blocks.elements()),
    "rows over columns": ((6, 4, 5), 2, Blocks(3)),
    "experts": ((5, 3, 8), 0, Blocks(2)),
    "one expert": ((1, 3, 8), 0, Blocks(2)),
}


class Experts(nn.Module):
    """A stack of matrices; with a vector, which starts elsewhere where the stack is shorter."""

    def __init__(self, shape: tuple[int, ...], mesh: DeviceMesh | None = None, dim: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(shape, 1, torch.float32))
        self.bias = nn.Parameter(values((24,), 2, torch.float32))
        if mesh is not None:
            self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(dim)]))

    def forward(self, x: Tensor) -> Tensor:
        return full(self.weight).square().sum() * x + self.bias.sum()


@pytest.mark.filterwarnings("ignore:.*no hooks.*")
@pytest.mark.parametrize(("shape", "dim", "wish"), STACKS.values(), ids=STACKS)
def test_stacks_that_tp_divides_unevenly_are_cut_along_the_same_dims(
    shape: tuple[int, ...], dim: int, wish: Blocks, tmp_path: Path
) -> None:
    def check(rank: int, world_size: int) -> None:
        mesh, reference = square(), Experts(shape)
        model = Experts(shape, mesh["tp"], dim)
        fully_shard(model, mesh["shard"], shard_placement_fn=lambda param: wish)
        weight, expected = model.weight, reference.weight.detach()
        everywhere: list[object] = [None] * world_size
        dist.all_gather_object(everywhere, weight.placements[0].dims)
        assert len(set(everywhere)) == 1, everywhere
        assert torch.equal(full(weight), expected)
        for reduced in range(len(shape)):
            assert torch.equal(full(weight.detach().sum(reduced)), expected.sum(reduced))
        model(torch.tensor(3.0)).backward()
        assert torch.equal(full(weight.grad), 6 * expected)
        dcp.save({"weight": weight, "grad": weight.grad}, checkpoint_id=tmp_path)
        flat = init_device_mesh("cpu", (4,))
        state = {name: distribute_tensor(torch.zeros(shape), flat, [Shard(0)]) for name in ("weight", "grad")}
        dcp.load(state, checkpoint_id=tmp_path)
        assert torch.equal(full(state["weight"]), expected)
        assert torch.equal(full(state["grad"]), 6 * expected)
        dcp.save({"weight": state["grad"], "grad": state["weight"]}, checkpoint_id=tmp_path / "swapped")
        dcp.load({"weight": weight, "grad": weight.grad}, checkpoint_id=tmp_path / "swapped")
        assert torch.equal(full(weight), 6 * expected)
        assert torch.equal(full(weight.grad), expected)

    run_ranks(check, 4)


def test_blocks_that_fit_on_one_tp_rank_only_are_refused_on_all() -> None:
    """Of 11 rows tp gives 6, two blocks of 3 for two ranks, and 5."""

    def shard_it(rank: int, world_size: int) -> None:
        mesh = square()
        model = Experts((11, 80_000), mesh["tp"])
        fully_shard(model, mesh["shard"], shard_placement_fn=lambda param: Blocks(3))

    errors_on_all_ranks(shard_it, 4, PaddingError, "weight", "add at most 10.00 %")


# ---------------------------------------------------------------- dp_mesh_dims


def on_the_whole_mesh(mesh: DeviceMesh) -> nn.Module:
    """The model with every parameter a DTensor on `mesh`: up cut by rows on tp, all else replicated."""
    model, names = build(), mesh.mesh_dim_names

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            cuts = {"tp": Shard(0)} if name == "up" else {}
            placements = [cuts.get(axis, Replicate()) for axis in names]
            module.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))

    return distribute_module(model, mesh, place)


@pytest.mark.parametrize(
    "dims",
    [DataParallelMeshDims(shard="dp"), DataParallelMeshDims(replicate="dp")],
    ids=["shard", "replicate"],
)
def test_parameters_on_the_whole_mesh(dims: DataParallelMeshDims) -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placements = [Shard(0), Replicate()]
        results = []
        for shard in (fully_shard, torch_fully_shard):
            model = on_the_whole_mesh(mesh)
            for module in (model.up, model):
                shard(module, mesh=mesh, dp_mesh_dims=dims)
            for name, param, expected in pairs(model, build()):
                assert param.device_mesh == mesh, name
                assert torch.equal(full(param), expected), name
            for _ in range(2):
                model.zero_grad()
                batch = normal_batch(mesh.get_local_rank("dp"), 4, 8)
                output = model(DTensor.from_local(batch, mesh, placements))
                output.redistribute(placements=placements).to_local().square().mean().backward()
            assert_grads_equal(model, oracle_grads(build(), loss, 2), 4)
            results.append({name: str(param.grad.placements) for name, param in model.named_parameters()})
        assert results[0] == results[1]

    run_ranks(check, 4)


# ---------------------------------------------------------------- replicate 2 x shard 2 x tp 2


@both_layouts
def test_hybrid_sharding_over_tensor_parallelism() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        data_rank = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
        model, reference = sharded(mesh, "replicate", "shard", hidden=5), build(hidden=5)
        for name, param, expected in pairs(model, reference):
            assert torch.equal(full(param), expected), name
        optimizer, reference_optimizer = adamw(model), adamw(reference)
        for step in range(2):
            train(model, optimizer, data_rank + 10 * step)
            train_reference(reference, reference_optimizer, 10 * step, 4)
        assert_params_close(model, reference)

    run_ranks(check, 8)
