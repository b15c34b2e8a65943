"""What a caller gets wrong is said at the call, on every rank, by name and with the remedy.

Every entry is a call, the exception it must raise on all ranks, and words of the message: the name, the fact,
the remedy. A call that raises leaves the modules as they were.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import shardkit
from shardkit import (
    AllGather,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    FSDPModule,
    ReduceScatter,
    ShardPlacementResult,
    fully_shard,
)
from tests.support.models import MLP, normal_batch
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("both_layouts")


@dataclass(frozen=True, slots=True)
class Bad:
    """A wrong call and how it must be refused."""

    call: Callable[[], object]
    error: type[Exception]
    words: tuple[str, ...]


def assert_all_refused(cases: Callable[[], dict[str, Bad]], world_size: int) -> None:
    """Every case raises what it must on every rank; one that does not is named."""

    def check(rank: int, world_size: int) -> None:
        for name, bad in cases().items():
            try:
                bad.call()
            except bad.error as error:
                missing = [word for word in bad.words if word not in str(error)]
                assert not missing, f"{name}: the message lacks {missing}: {error}"
            except Exception as error:
                error.add_note(f"in case {name!r}, expected {bad.error.__name__}")
                raise
            else:
                raise AssertionError(f"{name}: nothing was raised")

    run_ranks(check, world_size)


def linear(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# ---------------------------------------------------------------- modules


def sharded_twice() -> None:
    model = linear(4, 4)
    fully_shard(model)
    fully_shard(model)


def sharded_in_a_list_too() -> None:
    model = linear(4, 4, 4)
    fully_shard(model[0])
    fully_shard([model[0], model[1]])


def bad_modules() -> dict[str, Bad]:
    no_forward = ("has no forward", "each by itself, or a list of them")
    return {
        "a tensor": Bad(lambda: fully_shard(torch.ones(2)), TypeError, ("expected a module", "Tensor")),
        "nothing": Bad(lambda: fully_shard(None), TypeError, ("expected a module", "NoneType")),
        "an empty list": Bad(lambda: fully_shard([]), TypeError, ("expected a module",)),
        "a list with a string": Bad(lambda: fully_shard([nn.ReLU(), "x"]), TypeError, ("ReLU", "str")),
        "a class": Bad(lambda: fully_shard(nn.Linear), TypeError, ("expected a module",)),
        "a ModuleList": Bad(
            lambda: fully_shard(nn.ModuleList([nn.ReLU()])), ValueError, ("ModuleList", *no_forward)
        ),
        "a ModuleDict": Bad(
            lambda: fully_shard(nn.ModuleDict({"a": nn.ReLU()})), ValueError, ("ModuleDict", *no_forward)
        ),
        "a module sharded twice": Bad(sharded_twice, ValueError, ("already", "Sequential", "once")),
        "sharded and in a list": Bad(sharded_in_a_list_too, ValueError, ("already", "Linear", "once")),
    }


def test_modules() -> None:
    assert_all_refused(bad_modules, 2)


# ---------------------------------------------------------------- meshes


def outside(ranks: list[int]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks))


def shard_on(mesh: object, **options: object) -> Callable[[], object]:
    return lambda: fully_shard(linear(4, 4), mesh, **options)


def bad_meshes() -> dict[str, Bad]:
    cube = mesh(2, 2, 1, names=("a", "b", "c"))
    square = mesh(2, 2, names=("replicate", "shard"))
    dims = DataParallelMeshDims
    return {
        "three axes": Bad(shard_on(cube), ValueError, ("1 axis", "2 (replicate, shard)", "dp_mesh_dims")),
        "two axes without names": Bad(shard_on(mesh(2, 2)), ValueError, ("no names", "mesh_dim_names=")),
        "axes in the wrong order": Bad(
            shard_on(mesh(2, 2, names=("shard", "replicate"))), ValueError, ("first replicates",)
        ),
        "a size": Bad(shard_on(4), TypeError, ("expected a DeviceMesh, got int", "build_mesh")),
        "a group": Bad(shard_on(dist.group.WORLD), TypeError, ("expected a DeviceMesh", "init_device_mesh")),
        "an axis that is not there": Bad(
            shard_on(square, dp_mesh_dims=dims(shard="x")), ValueError, ("'x'", "('replicate', 'shard')")
        ),
        "an axis with two roles": Bad(
            shard_on(square, dp_mesh_dims=dims(shard="shard", replicate="shard")),
            ValueError,
            ("'shard' is given twice", "one role"),
        ),
        "plain parameters with dp_mesh_dims": Bad(
            shard_on(square, dp_mesh_dims=dims(shard="shard", replicate="replicate")),
            ValueError,
            ("'0.weight'", "DTensor on the whole mesh", "distribute_module"),
        ),
    }


def test_meshes() -> None:
    assert_all_refused(bad_meshes, 4)


def test_a_rank_that_is_not_in_the_mesh_is_told() -> None:
    def check(rank: int, world_size: int) -> None:
        part = outside([0, 1])
        if rank == 2:
            with pytest.raises(ValueError, match=r"rank 2 is not part of .*do not shard the module"):
                fully_shard(linear(4, 4), part)

    run_ranks(check, 3)


def distributed_on(mesh: DeviceMesh, *placements: object) -> nn.Module:
    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, placements)))

    return distribute_module(linear(4, 4), mesh, place)


def test_parameters_that_are_not_as_dp_mesh_dims_says() -> None:
    def cases() -> dict[str, Bad]:
        whole, other = mesh(2, 2, names=("dp", "tp")), mesh(4, 1, names=("dp", "tp"))
        dims = DataParallelMeshDims(shard="dp")
        cut = distributed_on(whole, Shard(0), Replicate())
        elsewhere = distributed_on(other, Replicate(), Replicate())
        return {
            "cut on the data-parallel axis": Bad(
                lambda: fully_shard(cut, whole, dp_mesh_dims=dims),
                ValueError,
                ("'0.weight'", "Replicate()", "'dp'"),
            ),
            "on another mesh": Bad(
                lambda: fully_shard(elsewhere, whole, dp_mesh_dims=dims),
                ValueError,
                ("'0.weight'", "Pass the mesh on which the parameters are"),
            ),
        }

    assert_all_refused(cases, 4)


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match=r"no process group.*torchrun.*init_process_group"):
        fully_shard(linear(4, 4))


# ---------------------------------------------------------------- placements and options


def placed(placement: object, *shape: int) -> Callable[[], object]:
    def call() -> None:
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(shape))
        fully_shard(model, shard_placement_fn=lambda param: placement)

    return call


def ignoring_what_is_sharded() -> None:
    model = linear(4, 4, 4)
    fully_shard(model[0])
    fully_shard(model, ignored_params={model[0].weight})


def meta_and_real() -> None:
    model = linear(4, 4, 4)
    model[1].to_empty(device="meta")
    fully_shard(model)


def not_contiguous() -> None:
    model = linear(4, 6)
    model[0].weight = nn.Parameter(torch.zeros(4, 6).t())
    fully_shard(model)


def channels_last() -> None:
    model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    fully_shard(model)


def zero_dim() -> None:
    model = linear(4, 4)
    model[0].logit_scale = nn.Parameter(torch.tensor(1.0))
    fully_shard(model)


def bad_options() -> dict[str, Bad]:
    divisors = ("do not divide", "divisor of 4")
    no_dim = ("'weight'", "names no dim of shape (4, 4)", "0 to 1")
    return {
        "Shard(2) of a matrix": Bad(placed(Shard(2), 4, 4), ValueError, no_dim),
        "Shard(-3) of a matrix": Bad(placed(Shard(-3), 4, 4), ValueError, ("'weight'", "names no dim")),
        "Shard(1) that does not divide": Bad(
            placed(Shard(1), 4, 6), NotImplementedError, ("'weight'", "dim 1", "evenly", "Use Shard(0)")
        ),
        "Replicate()": Bad(placed(Replicate(), 4, 4), TypeError, ("'weight'", "Replicate()", "Return None")),
        "a number": Bad(placed(0, 4, 4), TypeError, ("'weight'", "returned 0", "Return None")),
        "a result with a bad dim": Bad(
            lambda: placed(ShardPlacementResult(Shard(2), FSDPMeshInfo(mesh(4), 0)), 4, 4)(),
            ValueError,
            no_dim,
        ),
        "3 of 4 ranks": Bad(shard_on(mesh(4), reshard_after_forward=3), ValueError, ("=3", *divisors)),
        "0 ranks": Bad(shard_on(mesh(4), reshard_after_forward=0), ValueError, ("=0", *divisors)),
        "8 of 4 ranks": Bad(shard_on(mesh(4), reshard_after_forward=8), ValueError, ("=8", *divisors)),
        "a word": Bad(shard_on(mesh(4), reshard_after_forward="no"), TypeError, ("'no'", "Pass True")),
        "an ignored parameter of another unit": Bad(
            ignoring_what_is_sharded, ValueError, ("'0.weight'", "ignored_params")
        ),
        "an ignored name": Bad(shard_on(mesh(4), ignored_params={"0.weight"}), TypeError, ("'0.weight'",)),
        "a dtype for a policy": Bad(
            shard_on(mesh(4), mp_policy=torch.bfloat16), TypeError, ("mp_policy", "MixedPrecisionPolicy")
        ),
        "an offload policy's class": Bad(
            shard_on(mesh(4), offload_policy=CPUOffloadPolicy), TypeError, ("offload_policy", "OffloadPolicy")
        ),
        "meta and real": Bad(meta_and_real, ValueError, ("'1.weight'", "on meta", "'0.weight'", "Build")),
        "a transposed weight": Bad(not_contiguous, NotImplementedError, ("'0.weight'", ".contiguous()")),
        "channels last": Bad(channels_last, NotImplementedError, ("'weight'", "channels_last")),
        "0-dim": Bad(zero_dim, ValueError, ("'0.logit_scale'", "reshape(1)", "ignored_params")),
    }


def test_placements_and_options() -> None:
    assert_all_refused(bad_options, 4)


def test_a_refused_call_leaves_the_module_as_it_was() -> None:
    def check(rank: int, world_size: int) -> None:
        model = linear(4, 4, 4)
        before = list(model.parameters())
        for options in (
            {"reshard_after_forward": 3},
            {"shard_placement_fn": lambda param: Shard(5)},
            {"mesh": mesh(1, 2)},
        ):
            with pytest.raises(ValueError):
                fully_shard(model, **options)
            assert type(model) is nn.Sequential
            assert all(param is kept for param, kept in zip(model.parameters(), before, strict=True))
            assert not model._forward_pre_hooks
        fully_shard(model)
        model(torch.ones(1, 4)).sum().backward()

    run_ranks(check, 2)


# ---------------------------------------------------------------- methods


class Comm:
    """Does nothing."""

    def allocate(self, *size: object, **options: object) -> Tensor:
        return torch.empty(0)

    def __call__(self, **tensors: object) -> None:
        return None


class Gather(Comm, AllGather):
    """Does nothing."""


class Reduce(Comm, ReduceScatter):
    """Does nothing."""


def sharded(*options: object, **keywords: object) -> FSDPModule:
    model = linear(4, 4, 4)
    fully_shard(model[0])
    return fully_shard(model, *options, **keywords)


def several_buckets() -> FSDPModule:
    model = linear(4, 4)
    model[0].bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    return fully_shard(model)


def bad_methods() -> dict[str, Bad]:
    buckets = ("2 buckets", "units of their own")
    hybrid = mesh(1, 2, names=("replicate", "shard"))
    stream = torch.Stream(device="cpu") if hasattr(torch, "Stream") else None
    return {
        "prefetch a plain module": Bad(
            lambda: sharded().set_modules_to_forward_prefetch([nn.ReLU()]),
            ValueError,
            ("ReLU", "Shard it first"),
        ),
        "prefetch backward": Bad(
            lambda: sharded().set_modules_to_backward_prefetch(["x"]), ValueError, ("str", "Shard it first")
        ),
        "share a plain module": Bad(
            lambda: shardkit.share_comm_ctx([sharded(), nn.ReLU()]), ValueError, ("ReLU", "Call fully_shard")
        ),
        "a custom gather of two buckets": Bad(
            lambda: several_buckets().set_custom_all_gather(Gather()), ValueError, buckets
        ),
        "a custom reduction of two buckets": Bad(
            lambda: several_buckets().set_custom_reduce_scatter(Reduce()), ValueError, buckets
        ),
        "a hook of two buckets": Bad(
            lambda: several_buckets().set_all_reduce_hook(lambda row: None), ValueError, buckets
        ),
        "a stream with replicas": Bad(
            lambda: sharded(hybrid).set_all_reduce_hook(lambda row: None, stream=stream or object()),
            ValueError,
            ("stream of its own", "Leave `stream` out"),
        ),
        "a number of ranks, later": Bad(
            lambda: sharded().set_reshard_after_forward(2),
            ValueError,
            ("2", "expected a bool", "fully_shard"),
        ),
        "symmetric memory on gloo": Bad(
            lambda: sharded().set_symm_mem_for_comm(),
            NotImplementedError,
            ("nccl", "gloo", "Leave the call out"),
        ),
        "reset below the root": Bad(
            lambda: sharded()[0].reset_iter_state(), RuntimeError, ("reset_iter_state", "root")
        ),
        "a method that is not there": Bad(
            lambda: shardkit.register_fsdp_forward_method(sharded(), "encode"), ValueError, ("'encode'",)
        ),
        "max_input_buffers": Bad(
            lambda: sharded().set_reduce_scatter_max_input_buffers(0), ValueError, ("positive int, got 0",)
        ),
    }


def test_methods() -> None:
    assert_all_refused(bad_methods, 2)


def test_deepcopy_is_refused() -> None:
    def cases() -> dict[str, Bad]:
        words = ("cannot be deep-copied", "load state_dict()")
        return {"deepcopy": Bad(lambda: copy.deepcopy(sharded()), NotImplementedError, words)}

    assert_all_refused(cases, 1)


# ---------------------------------------------------------------- what is found at the first use


def a_list_as_root() -> None:
    model = linear(4, 4, 4)
    fully_shard([model[0], model[1]])
    model(torch.ones(1, 4))


def still_on_meta() -> None:
    with torch.device("meta"):
        model = linear(4, 4)
    fully_shard(model)
    model(torch.ones(1, 4))


def assigned_plain() -> None:
    model = sharded()
    model.load_state_dict(linear(4, 4, 4).state_dict(), assign=True)
    model(torch.ones(1, 4))


def assigned_elsewhere() -> None:
    model = sharded()
    weight = model[1].weight
    moved = distribute_tensor(torch.zeros(4, 4), weight.device_mesh, [Shard(1)])
    model.load_state_dict({"1.weight": moved}, assign=True, strict=False)
    model(torch.ones(1, 4))


def bad_uses() -> dict[str, Bad]:
    return {
        "a list as root": Bad(a_list_as_root, RuntimeError, ("without a root", "Call fully_shard", "last")),
        "still on meta": Bad(still_on_meta, RuntimeError, ("'0.weight'", "meta", "to_empty", "assign=True")),
        "assign plain tensors": Bad(
            assigned_plain, ValueError, ("weight'", "expected a DTensor", "distribute_tensor")
        ),
        "assign another placement": Bad(
            assigned_elsewhere, ValueError, ("'1.weight'", "Shard(dim=1)", "distribute_tensor")
        ),
    }


def test_first_uses() -> None:
    assert_all_refused(bad_uses, 2)


def test_loading_plain_tensors_gives_their_values_or_says_why_not() -> None:
    def check(rank: int, world_size: int) -> None:
        model, new = MLP(5, 3, 4), MLP(5, 3, 4)
        fully_shard(model)
        try:
            model.load_state_dict(new.state_dict())
        except (RuntimeError, ValueError) as error:
            assert "layers.0.weight" in str(error) and "DTensor" in str(error)
        else:
            for param, expected in zip(model.parameters(), new.parameters(), strict=True):
                assert isinstance(param, DTensor)
                assert torch.equal(param.full_tensor(), expected)
        model(normal_batch(rank, 2, 5)).mean().backward()

    run_ranks(check, 2)


def _grad_dtypes(rank: int, world_size: int) -> None:
    model = MLP(5, 3)
    name, param = next(iter(model.named_parameters()))
    param.grad_dtype = torch.bfloat16
    with pytest.warns(UserWarning, match=f"param '{name}': its grad_dtype torch.bfloat16 does not survive"):
        fully_shard(model)
    model(normal_batch(rank, 2, 5)).sum().backward()
    assert all(param.grad is not None and param.grad.dtype == param.dtype for param in model.parameters())


def test_a_grad_dtype_that_sharding_drops_is_named_in_a_warning():
    run_ranks(_grad_dtypes, 2)
