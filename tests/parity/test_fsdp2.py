"""Behaviour by behaviour like torch's FSDP2: what is registered when, gradients, forms of parameters."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardkit
from shardkit import FSDPMeshInfo, FSDPModule, MixedPrecisionPolicy, ShardPlacementResult
from tests.parity.peers import grads, kinds, same_in_both, values
from tests.support.models import CASES, MLP, normal_batch
from tests.support.ranks import run_ranks

Library = Any
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW_REDUCE = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


def flat(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def grid(replicate: int, shard: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def mlp(lib: Library, **options: object) -> nn.Module:
    return CASES["mlp"].sharded(lib.fully_shard, **options)


def backward(model: nn.Module, number: int) -> Tensor:
    """Loss and gradients of the MLP's batch of that number."""
    loss = CASES["mlp"].loss(model, number)
    loss.backward()
    return loss


# ---------------------------------------------------------------- the surface


def test_every_public_method_of_torchs_fsdp_module_is_our_own() -> None:
    theirs = {name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")} | {"_apply"}
    assert theirs <= vars(FSDPModule).keys()


def test_torch_takes_our_modules_for_its_own() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        return [
            isinstance(model, torch_fsdp.FSDPModule),
            isinstance(model, MLP),
            type(model).__name__,
            type(model.layers).__name__,
            type(model.layers[0]).__name__,
            type(model.layers[:2]).__name__,
            type(model).__mro__[2].__name__,
            torch_fsdp.fully_shard.state(model) is not None,
            lib.fully_shard.state(model.layers[2]) is None,
            [name for name, _ in model.named_modules()],
        ]

    same_in_both(run)


def test_fully_shard_returns_what_it_was_given() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        module, pair = nn.Linear(2, 2), [nn.Linear(2, 2), nn.Linear(2, 2)]
        return [lib.fully_shard(module) is module, lib.fully_shard(pair) is pair]

    same_in_both(run)


# ---------------------------------------------------------------- what is registered


@pytest.mark.parametrize("setting", [True, False, None])
def test_registered_parameters_before_between_and_after(setting: bool | None) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib, reshard_after_forward=setting)
        seen = [kinds(model)]
        loss = CASES["mlp"].loss(model, rank)
        seen.append(kinds(model))
        loss.backward()
        seen.append(kinds(model))
        return seen, grads(model)

    same_in_both(run)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_number_of_ranks_to_reshard_to_trains_alike(num_ranks: int) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib, reshard_after_forward=num_ranks)
        with torch.no_grad():
            outputs = [model(normal_batch(rank, 4, 7)) for _ in range(2)]
        losses = [backward(model, rank + 10 * step) for step in range(2)]
        return outputs, losses, grads(model), kinds(model)

    same_in_both(run, 4)


def test_unshard_and_reshard_change_what_is_registered() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        layer = model.layers[0]
        results = [layer.unshard(), kinds(model), layer.weight.detach().clone()]
        layer.reshard()
        results.append(kinds(model))
        handle = layer.unshard(async_op=True)
        results.append(isinstance(handle, torch_fsdp.UnshardHandle))
        handle.wait()
        handle.wait()
        results.append(kinds(model))
        return [*results, backward(model, rank), kinds(model), grads(model)]

    same_in_both(run)


def test_a_forward_waits_for_an_unshard_by_itself() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        for layer in model.layers[:2]:
            layer.unshard(async_op=True)
        return backward(model, rank), grads(model)

    same_in_both(run)


def test_hooks_of_the_user_see_gathered_parameters() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model, seen = CASES["mlp"].build(), []
        layer = model.layers[0]
        layer.register_forward_pre_hook(lambda m, _: seen.append(("before", tuple(m.weight.shape))))
        layer.register_forward_hook(lambda m, *_: seen.append(("after", tuple(m.weight.shape))))
        for module in [*CASES["mlp"].units(model), model]:
            lib.fully_shard(module)
        backward(model, rank)
        return seen

    same_in_both(run)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), BF16, LOW_REDUCE], ids=["fp32", "bf16", "low"])
def test_losses_and_gradients(precision: MixedPrecisionPolicy) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        results = {}
        for name in ("mlp", "few_rows", "transformer", "tied", "frozen", "lora", "experts", "conv"):
            model = CASES[name].sharded(lib.fully_shard, mp_policy=precision)
            loss = CASES[name].loss(model, rank)
            loss.backward()
            results[name] = [loss, grads(model)]
        return results

    same_in_both(run)


@pytest.mark.parametrize("mode", ["sync", "no_sync", "no_all_reduce", "kept"])
def test_accumulated_gradients(mode: str) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        results = []
        for precision in (MixedPrecisionPolicy(), BF16, LOW_REDUCE):
            mesh = grid(world_size, 1) if mode == "no_all_reduce" else flat(world_size)
            model = mlp(lib, mesh=mesh, mp_policy=precision)
            for step in range(3):
                is_last = step == 2
                if mode in ("no_sync", "kept"):
                    model.set_requires_gradient_sync(is_last)
                if mode == "no_all_reduce":
                    model.set_requires_all_reduce(is_last)
                if mode == "kept":
                    model.set_is_last_backward(is_last)
                    model.set_reshard_after_backward(is_last)
                backward(model, rank + 10 * step)
                results.append([kinds(model), grads(model) if is_last else None])
        return results

    same_in_both(run)


def test_zeroed_gradients_accumulate_as_none_do() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model, results = mlp(lib), []
        for step, set_to_none in enumerate((False, True, False)):
            backward(model, rank + 10 * step)
            results.append(grads(model))
            model.zero_grad(set_to_none=set_to_none)
        return results

    same_in_both(run)


def test_forwards_without_grad_before_training_steps() -> None:
    """Before only: after a backward, torch would go on with the weights that such a forward gathered."""

    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for step in range(2):
            with torch.no_grad():
                results.append(model(normal_batch(rank, 4, 7)))
            backward(model, rank + 10 * step)
            optimizer.step()
        return results, values(model)

    same_in_both(run)


def test_a_submodule_runs_by_itself() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = mlp(lib)
        backward(model, rank)
        model.layers[0](normal_batch(rank, 4, 7)).square().mean().backward()
        return grads(model), kinds(model)

    same_in_both(run)


# ---------------------------------------------------------------- forms of parameters


def test_shard_placement_fn_cuts_the_dim_it_names() -> None:
    def place(param: nn.Parameter) -> Shard | None:
        return None if param.ndim == 1 else Shard(-1 if param.shape[0] == 6 else 1)

    def run(lib: Library, rank: int, world_size: int) -> object:
        results = []
        for precision in (MixedPrecisionPolicy(), BF16):
            torch.manual_seed(2)
            model = MLP(4, 8, 6, 8)
            lib.fully_shard(model, shard_placement_fn=place, mp_policy=precision)
            results.append([kinds(model), values(model)])
            model(normal_batch(rank, 3, 4)).square().mean().backward()
            results.append(grads(model))
        return results

    same_in_both(run)


@pytest.mark.parametrize("world_size", [3, 4])
def test_uneven_shapes_lie_alike(world_size: int) -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = CASES["few_rows"].sharded(lib.fully_shard)
        before = values(model)
        CASES["few_rows"].loss(model, rank).backward()
        return kinds(model), before, grads(model)

    same_in_both(run, world_size)


def test_parameters_with_a_mesh_of_their_own() -> None:
    """Experts are sharded over pairs of ranks and the rest over all four: two collectives in one unit."""

    def run(lib: Library, rank: int, world_size: int) -> object:
        pairs, everyone = FSDPMeshInfo(grid(2, 2)["shard"], 0), FSDPMeshInfo(flat(4), 0)
        results = []
        model = CASES["experts"].build()
        lib.fully_shard(
            model,
            mesh=everyone.mesh,
            shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), pairs if p.ndim == 3 else everyone),
        )
        results += [kinds(model), values(model)]
        CASES["experts"].loss(model, rank).backward()
        return [*results, grads(model)]

    same_in_both(run, 4)


def test_ignored_parameters_stay_as_they_are() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = CASES["mlp"].build()
        ignored = {model.layers[0].bias, *model.layers[2].parameters()}
        lib.fully_shard(model.layers[1])
        lib.fully_shard(model, ignored_params=ignored)
        kept = all(any(p is other for other in model.parameters()) for p in ignored)
        backward(model, rank)
        return kept, kinds(model), grads(model)

    same_in_both(run)


def test_a_list_of_modules_is_one_unit() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = CASES["mlp"].build()
        lib.fully_shard([model.layers[0], model.layers[2]], reshard_after_forward=True)
        lib.fully_shard(model)
        loss = CASES["mlp"].loss(model, rank)
        between = kinds(model)
        loss.backward()
        return between, kinds(model), grads(model), type(model.layers[0]).__name__

    same_in_both(run)


def test_state_dicts_have_the_same_keys_placements_and_values() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        results = []
        for name in ("few_rows", "tied", "conv", "experts"):
            model = CASES[name].sharded(lib.fully_shard)
            results.append(model.state_dict())
            with torch.no_grad():
                CASES[name].loss(model, rank)
            results.append(model.state_dict())
            CASES[name].loss(model, rank)  # kept gathered at the root
            held = model.state_dict()
            results.append({key: value.detach().clone() for key, value in held.items()})
            model.load_state_dict({key: torch.zeros_like(value) for key, value in held.items()})
            results.append(values(model))
        return results

    same_in_both(run)


# ---------------------------------------------------------------- inputs and outputs


@dataclass
class Pair:
    """A container that forward takes and returns."""

    left: Tensor
    right: Tensor


Named = namedtuple("Named", "left right")


class Containers(nn.Module):
    """Takes tensors in containers and gives them back in others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(4.0))
        self.seen: list[torch.dtype] = []

    def forward(self, pair: Pair, *, named: Named, rest: dict[str, list[Tensor]]) -> dict[str, Any]:
        tensors = [pair.left, pair.right, named.left, named.right, *rest["list"]]
        self.seen = [tensor.dtype for tensor in tensors]
        a, b, c, d, e, count = tensors
        return {"pair": Pair(a * self.scale, b + c), "more": [(d * e * self.scale,), Named(count, "text")]}


def test_tensors_in_containers_are_cast_and_watched() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        model = Containers()
        lib.fully_shard(model, mp_policy=policy)
        a, b, c, d, e = normal_batch(rank, 5, 4).requires_grad_().unbind()
        out = model(Pair(a, b), named=Named(c, d), rest={"list": [e, torch.arange(4)]})
        inner, ((product,), named) = out["pair"], out["more"]
        (inner.left.sum() + product.sum()).backward()
        dtypes = [str(t.dtype) for t in (inner.left, inner.right, product, named.left)]
        return str(model.seen), dtypes, type(inner).__name__, named.right, grads(model)

    same_in_both(run)


def test_inputs_are_left_alone_where_the_policy_says_so() -> None:
    def run(lib: Library, rank: int, world_size: int) -> object:
        model = nn.Linear(4, 3)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        lib.fully_shard(model, mp_policy=policy)
        output = model(normal_batch(rank, 2, 4).bfloat16())
        try:
            model(normal_batch(rank, 2, 4))
        except RuntimeError:
            return str(output.dtype), "refused float32"
        return str(output.dtype)

    same_in_both(run)


def test_gradients_are_dtensors_placed_as_their_parameters() -> None:
    def check(rank: int, world_size: int) -> None:
        for name in ("few_rows", "experts", "conv"):
            model = CASES[name].sharded(shardkit.fully_shard, mp_policy=BF16)
            CASES[name].loss(model, rank).backward()
            for param in model.parameters():
                assert isinstance(param.grad, DTensor)
                assert (param.grad.placements, param.grad.device_mesh) == (
                    param.placements,
                    param.device_mesh,
                )
                assert (param.grad.shape, param.grad.dtype) == (param.shape, param.dtype)

    run_ranks(check, 3)
