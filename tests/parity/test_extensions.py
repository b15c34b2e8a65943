"""Tensors that say themselves what to gather: `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

Weights are kept in float32 and gathered in bfloat16, by a wrapper subclass or by functions set on plain local
tensors; the oracle is the same model with its weights rounded to bfloat16.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from shardkit import Blocks, fully_shard, model_plan
from shardkit._torch import local_of
from shardkit.collectives import count_traffic
from shardkit.errors import PlanMismatchError
from tests.support.models import MLP, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import errors_on_all_ranks, run_ranks

aten = torch.ops.aten
Pre = Callable[..., tuple[tuple[Tensor, ...], object]]


class RoundedTensor(Tensor):
    """A float32 tensor around another one, gathered in bfloat16."""

    # what keeps the class: the ops by which a tensor is cut, copied and moved
    KEEPS = (
        *(aten.new_zeros.default, aten.empty_like.default, aten.zeros_like.default, aten.clone.default),
        *(aten.slice.Tensor, aten.split.Tensor, aten.view.default, aten.as_strided.default),
        *(aten.detach.default, aten.copy_.default, aten._to_copy.default),
    )

    @staticmethod
    def __new__(cls, data: Tensor) -> RoundedTensor:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self.data_inside = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> RoundedTensor:
        return cls(inner["data_inside"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: t.data_inside, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(Tensor, cls, result) if func in cls.KEEPS else result

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: object, module: object, policy: object
    ) -> tuple[tuple[Tensor], str]:
        padded = torch.zeros(math.ceil(outer_size[0] / mesh.size()), *outer_size[1:], dtype=torch.bfloat16)
        padded[: self.shape[0]] = self.data_inside
        return (padded,), "from pre"

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: object,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        assert metadata == "from pre"
        return round_trip(outputs, dtype, out)


class RaggedRounded(RoundedTensor):
    """The same, without the padding, which no ragged shard has."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], str]:  # type: ignore[override]
        return (self.data_inside.bfloat16(),), "from pre"


class ExactTensor(RoundedTensor):
    """The same, gathered as it is."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], None]:  # type: ignore[override]
        return (self.data_inside,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        assert out is None
        return outputs[0], outputs


def round_trip(
    outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    (rounded,) = outputs
    assert rounded.dtype == torch.bfloat16
    if out is not None:
        assert type(out) in (Tensor, nn.Parameter)
        out.copy_(rounded)
        return None
    whole = rounded.to(dtype)
    return whole, (rounded, whole)


def pre_with_mesh(self: Tensor, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], object]:
    assert mesh.ndim == 1
    return (self.to(torch.bfloat16),), None


def post(
    self: Tensor, outputs: tuple[Tensor, ...], metadata: object, dtype: torch.dtype, *, out: Any = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    assert metadata is None
    return round_trip(outputs, dtype, out)


def extend(param: Tensor, pre: Pre = pre_with_mesh) -> None:
    """Set the functions on the local tensor of a sharded parameter, as users do."""
    local: Any = local_of(param)
    local.fsdp_pre_all_gather = types.MethodType(pre, local)
    local.fsdp_post_all_gather = types.MethodType(post, local)


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if "weight" in name]


def mlp(*sizes: int) -> MLP:
    torch.manual_seed(1)
    return MLP(*sizes)


def rounded_copy(kept: MLP, sizes: Sequence[int]) -> MLP:
    """What a gather of bfloat16 weights makes of the model."""
    used = MLP(*sizes)
    used.load_state_dict(
        {name: t.bfloat16().float() if "weight" in name else t for name, t in kept.state_dict().items()}
    )
    return used


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(normal_batch(rank, 4, 7)).square().mean()


def shard_layers(model: MLP, **options: Any) -> MLP:
    """Every layer a unit, the last one the root's."""
    for layer in list(model.layers)[:-1]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def assert_trains_as_rounded(
    model: nn.Module, sizes: Sequence[int], rank: int, world_size: int, num_steps: int = 3
) -> None:
    """Gradients are those of the rounded weights, and every step is seen by the next forward."""
    kept = mlp(*sizes)
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in (model.parameters(), kept.parameters())]
    for _ in range(num_steps):
        expected = oracle_grads(rounded_copy(kept, sizes), loss_of, world_size)
        loss_of(model, rank).backward()
        assert_grads_equal(model, expected, world_size)
        for name, param in kept.named_parameters():
            param.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


EVEN, UNEVEN = (7, 12, 6, 6), (7, 13, 5, 3)

# ---------------------------------------------------------------- against the oracle


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_wrapper_subclass_trains_as_what_it_gathers(world_size: int, reshard_after_forward: bool) -> None:
    def check(rank: int, world_size: int) -> None:
        model = mlp(*UNEVEN)
        for layer in model.layers:
            layer.weight = nn.Parameter(RoundedTensor(layer.weight.detach()))
        shard_layers(model, reshard_after_forward=reshard_after_forward)
        assert {type(local_of(param)) for param in weights(model)} == {RoundedTensor}
        assert_trains_as_rounded(model, UNEVEN, rank, world_size)

    run_ranks(check, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_functions_set_on_local_tensors_after_to_empty_are_used(world_size: int) -> None:
    def check(rank: int, world_size: int) -> None:
        with torch.device("meta"):
            model = MLP(*EVEN)
        shard_layers(model)
        model.to_empty(device="cpu")
        mesh = next(model.parameters()).device_mesh
        state = mlp(*EVEN).state_dict()
        model.load_state_dict({name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in state.items()})
        for param in weights(model):
            extend(param)
        assert_trains_as_rounded(model, EVEN, rank, world_size)

    run_ranks(check, world_size)


def test_functions_set_between_iterations_take_effect_and_go_with_the_tensor() -> None:
    def check(rank: int, world_size: int) -> None:
        kept, model = mlp(*EVEN), shard_layers(mlp(*EVEN))

        def assert_grads_of(used: nn.Module) -> None:
            loss_of(model, rank).backward()
            assert_grads_equal(model, oracle_grads(used, loss_of, world_size), world_size)
            model.zero_grad()

        assert_grads_of(kept)
        for param in weights(model):
            extend(param)
        assert_grads_of(rounded_copy(kept, EVEN))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        assert_grads_of(kept)

    run_ranks(check, 2)


def test_a_subclass_may_be_replaced_by_one_that_gathers_something_else() -> None:
    def check(rank: int, world_size: int) -> None:
        kept, model = nn.Linear(7, 4), nn.Linear(7, 4)
        model.load_state_dict(kept.state_dict())
        model.weight = nn.Parameter(RoundedTensor(model.weight.detach()))
        fully_shard(model)
        loss_of(model, rank)
        model.reshard()
        sharded = model.weight
        exact = DTensor.from_local(
            ExactTensor(local_of(sharded).data_inside), sharded.device_mesh, [Shard(0)]
        )
        model.weight = nn.Parameter(exact)
        loss_of(model, rank).backward()
        assert_grads_equal(model, oracle_grads(kept, loss_of, world_size), world_size)

    run_ranks(check, 2)


@pytest.mark.parametrize("placement", [Shard(1), Blocks(2)])
def test_other_placements_join_along_their_dim(placement: Shard | Blocks) -> None:
    def check(rank: int, world_size: int) -> None:
        sizes = (6, 8, 4) if isinstance(placement, Shard) else (6, 7, 5)

        def loss(model: nn.Module, rank: int) -> Tensor:
            return model(normal_batch(rank, 4, 6)).square().mean()

        model = fully_shard(mlp(*sizes), shard_placement_fn=lambda p: placement if p.ndim == 2 else None)
        for param in weights(model):
            extend(param)
        for _ in range(2):
            loss(model, rank).backward()
            assert_grads_equal(model, oracle_grads(rounded_copy(mlp(*sizes), sizes), loss, world_size), 2)
            model.zero_grad()

    run_ranks(check, 2)


def test_a_wrapper_subclass_may_be_ragged() -> None:
    def check(rank: int, world_size: int) -> None:
        model = mlp(*UNEVEN)
        for layer in model.layers:
            layer.weight = nn.Parameter(RaggedRounded(layer.weight.detach()))
        shard_layers(model, shard_placement_fn=lambda param: Blocks(3))
        assert_trains_as_rounded(model, UNEVEN, rank, world_size)

    run_ranks(check, 3)


def test_tensor_parallel_parts_are_extended_too() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        kept, model = mlp(7, 12), mlp(7, 12)
        parallelize_module(model, mesh["tp"], {"layers.0": ColwiseParallel(use_local_output=False)})
        fully_shard(model, mesh["dp"])
        extend(model.layers[0].weight)
        row = mesh.get_local_rank("dp")
        for _ in range(2):
            output = model(normal_batch(row, 4, 7)).full_tensor()
            torch.testing.assert_close(
                output, rounded_copy(kept, (7, 12))(normal_batch(row, 4, 7)), rtol=0, atol=1e-6
            )
            output.square().mean().backward()

    run_ranks(check, 4)


# ---------------------------------------------------------------- the contract


def test_the_functions_get_the_shard_mesh_the_whole_shape_the_module_and_the_policy() -> None:
    def check(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
        model = fully_shard(nn.Sequential(nn.Linear(3, 8)), mesh, mp_policy=policy)
        seen = []

        def pre_all(self: Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
            seen.append((mesh, size, stride, module, policy))
            return (self.to(torch.bfloat16),), None

        def post_all(
            self: Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
        ) -> Any:
            seen.append(dtype)
            return post(self, outputs, metadata, dtype, out=out)

        extend(model[0].weight, pre_all)
        local_of(model[0].weight).fsdp_post_all_gather = types.MethodType(post_all, local_of(model[0].weight))
        output = model(torch.ones(1, 3))
        assert output.dtype == torch.float16
        (got, *others), dtype = seen
        assert got == mesh["shard"] and got.ndim == 1
        assert others == [torch.Size((8, 3)), (3, 1), model[0], policy]
        assert dtype == torch.float16

    run_ranks(check, 4)


def two_tensor_pre(self: TwoTensor, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
    return (self.a, self.b), None


def two_tensor_post(
    self: TwoTensor, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
) -> Any:
    a, b = outputs
    if out is None:
        return TwoTensor(a, b).to(dtype), (a, b)
    assert isinstance(out, TwoTensor)
    if a.dtype == dtype:  # nothing to do: the parameter is made of the outputs
        assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
    else:
        out.a.copy_(a)
        out.b.copy_(b)
    return None


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_a_gathered_subclass_may_live_in_the_outputs(
    param_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoTensor, "fsdp_pre_all_gather", two_tensor_pre, raising=False)
    monkeypatch.setattr(TwoTensor, "fsdp_post_all_gather", two_tensor_post, raising=False)

    def check(rank: int, world_size: int) -> None:
        torch.manual_seed(1)
        kept = nn.Linear(7, 4, bias=False)
        model = nn.Sequential(nn.Linear(7, 4, bias=False))
        data = kept.weight.detach()
        model[0].weight = nn.Parameter(TwoTensor(data.clone(), data.clone()))
        fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
        fully_shard(model)
        optimizers = [torch.optim.SGD(params, lr=0.1) for params in (model.parameters(), kept.parameters())]
        for _ in range(3):
            expected = oracle_grads(kept, loss_of, world_size, param_dtype=param_dtype)
            loss_of(model, rank).backward()
            assert type(local_of(model[0].weight)) is TwoTensor
            assert torch.equal(model[0].weight.grad.full_tensor(), expected["weight"])
            kept.weight.grad = expected["weight"]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(check, 2)


def test_resharding_frees_what_was_gathered_and_the_next_gather_brings_it_back() -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(3, 8, bias=False)))
        kept: list[Tensor] = []

        def post_kept(
            self: Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
        ) -> Any:
            assert all(tensor.untyped_storage().nbytes() for tensor in kept)
            made = post(self, outputs, metadata, dtype, out=out)
            kept.extend(made[1] if made else ())
            return made

        extend(model[0].weight)
        local_of(model[0].weight).fsdp_post_all_gather = types.MethodType(
            post_kept, local_of(model[0].weight)
        )
        for _ in range(2):
            model.unshard()
            gathered = model[0].weight
            assert [tensor.untyped_storage().nbytes() for tensor in (*kept, gathered)] == [48, 96, 96]
            model.reshard()
            assert [tensor.untyped_storage().nbytes() for tensor in (*kept, gathered)] == [0, 0, 0]
        assert len(kept) == 2

    run_ranks(check, 2)


def test_one_gather_a_unit_sends_only_what_pre_returned() -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False)))
        for param in weights(model):
            extend(param)
        for _ in range(2):
            with count_traffic() as traffic:
                model(torch.ones(1, 16))
            model.reshard()
        assert traffic.num_calls == {"all_gather": 1}
        assert traffic.sent_bytes == {"all_gather": 2 * 16 * 8 * 2 // world_size}

    run_ranks(check, 2)


def test_a_report_counts_the_bytes_of_the_users_own_tensors() -> None:
    def check(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(16, 8, bias=False))
        model[0].weight = nn.Parameter(RoundedTensor(model[0].weight.detach()))
        (unit,) = model_plan(fully_shard(model)).units
        assert unit.buckets[0].shard_bytes == 16 * 8 * 4 // world_size

    run_ranks(check, 2)


def test_frozen_extended_parameters_travel_only_to_be_used() -> None:
    def check(rank: int, world_size: int) -> None:
        rounded, model = rounded_copy(mlp(*EVEN), EVEN), mlp(*EVEN)
        for param in (*weights(rounded), *weights(model)):
            param.requires_grad_(False)
        shard_layers(model)
        for param in weights(model):
            extend(param)
        for _ in range(2):
            with count_traffic() as traffic:
                loss_of(model, rank).backward()
            assert_grads_equal(model, oracle_grads(rounded, loss_of, world_size), world_size)
            model.zero_grad()
        assert traffic.num_calls["reduce_scatter"] == 3  # of the biases
        assert traffic.num_calls["all_gather"] == 3 * 2 + 2 * 2  # the root's parameters are kept for backward

    run_ranks(check, 2)


def test_training_after_a_first_forward_in_inference_mode() -> None:
    def check(rank: int, world_size: int) -> None:
        model = shard_layers(mlp(*EVEN))
        for param in weights(model):
            extend(param)
        with torch.inference_mode():
            loss_of(model, rank)
        assert_trains_as_rounded(model, EVEN, rank, world_size)

    run_ranks(check, 2)


# ---------------------------------------------------------------- mistakes


def test_an_uneven_parameter_without_padding_is_an_error_on_all_ranks() -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 5)))
        extend(model[0].weight)
        model(torch.ones(1, 4))

    errors_on_all_ranks(
        check, 3, ValueError, "'0.weight'", "with the padded sharded size (2, 4) on every rank",
        "(1, 4) on rank 2",
    )  # fmt: skip


def test_ranks_that_send_different_tensors_are_an_error_on_all_ranks() -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 6)))
        extend(model[0].weight, lambda self, mesh: ((self.to((torch.bfloat16, torch.half)[rank]),), None))
        model(torch.ones(1, 4))

    errors_on_all_ranks(check, 2, ValueError, "'0.weight'", "torch.float16 (3, 4) on rank 1", "same dtypes")


def test_functions_on_one_rank_only_are_an_error_on_all_ranks() -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 6)))
        if rank == 1:
            extend(model[0].weight)
        model(torch.ones(1, 4))

    errors_on_all_ranks(check, 2, PlanMismatchError, "0.weight")


def test_other_shapes_than_at_first_are_refused() -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 6)))
        dtypes = iter((torch.bfloat16, torch.float32))
        extend(model[0].weight, lambda self, mesh: ((self.to(next(dtypes)),), None))
        for _ in range(2):
            model(torch.ones(1, 4))
            model.reshard()

    errors_on_all_ranks(check, 2, ValueError, "'0.weight'", "at first", "each time")


def one_function(param: Tensor) -> None:
    extend(param)
    del local_of(param).fsdp_post_all_gather  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("set_functions", "error", "words"),
    [
        (one_function, ValueError, "has fsdp_pre_all_gather and no fsdp_post_all_gather"),
        (lambda param: extend(param, lambda self, mesh, size: None), TypeError, "got fsdp_pre_all_gather"),
        (lambda param: extend(param, lambda self, mesh: (self, None)), TypeError, "Return (tensor,), None"),
    ],
)
def test_functions_of_another_form_are_refused(
    set_functions: Callable[[Tensor], None], error: type[Exception], words: str
) -> None:
    def check(rank: int, world_size: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(4, 6)))
        set_functions(model[0].weight)
        model(torch.ones(1, 4))

    errors_on_all_ranks(check, 2, error, "'0.weight'", words)


def test_a_wrapper_without_the_functions_is_refused() -> None:
    def check(rank: int, world_size: int) -> None:
        model = nn.Linear(4, 6)
        model.weight = nn.Parameter(TwoTensor(torch.ones(6, 4), torch.ones(6, 4)))
        fully_shard(model)

    errors_on_all_ranks(check, 2, TypeError, "'weight'", "its TwoTensor wraps tensors", "Define fsdp_pre")


@pytest.mark.parametrize("early", [True, False])
def test_reshard_after_forward_to_fewer_ranks_is_refused(early: bool) -> None:
    def check(rank: int, world_size: int) -> None:
        model = nn.Sequential(nn.Linear(4, 8))
        if early:
            model[0].weight = nn.Parameter(RoundedTensor(model[0].weight.detach()))
        fully_shard(model, reshard_after_forward=2)
        extend(model[0].weight)
        model(torch.ones(1, 4))

    errors_on_all_ranks(check, 4, NotImplementedError, "'0.weight'", "Pass True or False")
