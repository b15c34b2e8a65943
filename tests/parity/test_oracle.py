"""Gradients and parameters against one process: model x strategy x placement x precision x accumulation.

    full        shards over all ranks, freed after forward
    kept        the same, kept until backward is over
    copies      F = 1: every rank holds everything, one all-reduce
    hybrid      2 copies of 2 shards
    halves      freed to one half after forward (reshard_after_forward=2 on 4 ranks)

    rows        Shard(0)
    ragged      Blocks()
    mixed       both in one unit, and cuts inside rows

At two ranks everything is equal to the bit. At three and four a sum may run in another order, so 1e-6 of the
largest gradient is allowed where it is added in float32; where it is added in 16 bits the order would show,
so there the model's numbers are small integers, whose sums are exact in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardkit import Blocks, MixedPrecisionPolicy, fully_shard
from tests.support.models import CASES, MLP, Case, normal_batch
from tests.support.oracle import assert_grads_equal, oracle_grads
from tests.support.ranks import run_ranks

LR = 0.5
FP16_LOSS_SCALE = 4096.0  # as every float16 training has one: without, small gradients are subnormal


def integers(model: nn.Module, rank: int) -> Tensor:
    """The loss of a two-layer linear model whose inputs, activations and gradients are small integers."""
    x = torch.randint(-2, 3, (3, 5), generator=torch.Generator().manual_seed(rank)).float()
    return model(x).float().sum()


def integer_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape))
    return model


def used_alike(name: str) -> bool:
    return name != "branch_by_rank"  # see test_patterns.py


MODELS = {name: case for name, case in CASES.items() if used_alike(name)}
INTEGERS = {"integers": Case(integer_model, integers, ("0",))}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of compute and reduction, and what to train with them."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)

    @property
    def adds_in(self) -> torch.dtype:
        return self.reduce_dtype or self.param_dtype or torch.float32

    @property
    def learning_rate(self) -> float:
        return LR / FP16_LOSS_SCALE if self.param_dtype == torch.float16 else LR

    def cases(self, world_size: int) -> dict[str, Case]:
        in_any_order = world_size <= 2 or self.adds_in == torch.float32
        cases = MODELS | INTEGERS if in_any_order else INTEGERS
        return cases if self.param_dtype != torch.float16 else {n: scaled(case) for n, case in cases.items()}


def scaled(case: Case) -> Case:
    if case is INTEGERS["integers"]:
        return case
    return Case(case.make, lambda model, rank: case.loss(model, rank) * FP16_LOSS_SCALE, case.unit_names)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "bf16_fp32": Precision(torch.bfloat16, torch.float32),
    "fp32_bf16": Precision(None, torch.bfloat16),
    "fp16": Precision(torch.float16),
}


def flat(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def grid(replicate: int, world_size: int) -> DeviceMesh:
    shape = (replicate, world_size // replicate)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


Options = dict[str, object]
STRATEGIES: dict[str, Callable[[int], Options]] = {
    "full": lambda world_size: {"mesh": flat(world_size), "reshard_after_forward": True},
    "kept": lambda world_size: {"mesh": flat(world_size), "reshard_after_forward": False},
    "copies": lambda world_size: {"mesh": grid(world_size, world_size)},
    "hybrid": lambda world_size: {"mesh": grid(2, world_size)},
    "halves": lambda world_size: {"mesh": flat(world_size), "reshard_after_forward": 2},
}


def mixed(param: nn.Parameter) -> Shard | Blocks:
    """Ragged and interleaved parameters in one unit."""
    if param.ndim == 1:
        return Blocks.elements()
    return Shard(0) if param.numel() % 2 else Blocks(2)


PLACEMENTS: dict[str, Callable[[nn.Parameter], Shard | Blocks] | None] = {
    "rows": None,  # Shard(0)
    "ragged": lambda param: Blocks(),
    "mixed": mixed,
}
RUNS = [
    ("full", 1, "rows"),
    ("full", 2, "rows"),
    ("full", 3, "rows"),
    ("full", 4, "rows"),
    ("kept", 2, "rows"),
    ("copies", 2, "rows"),
    ("copies", 3, "rows"),
    ("hybrid", 4, "rows"),
    ("halves", 4, "rows"),
    ("full", 1, "ragged"),
    ("full", 2, "ragged"),
    ("full", 3, "mixed"),
    ("kept", 2, "mixed"),
    ("copies", 2, "mixed"),
    ("hybrid", 4, "ragged"),
    ("halves", 4, "mixed"),
]


def options_of(strategy: str, world_size: int, placement: str) -> Options:
    """What `fully_shard` is told."""
    return {**STRATEGIES[strategy](world_size), "shard_placement_fn": PLACEMENTS[placement]}


def runs_at(world_size: int, placement: str) -> list[tuple[str, str]]:
    """(model, precision) of everything that can be compared on so many ranks.

    Placement and precision meet in one place, the cast into the rows: ragged runs leave out the precisions
    that cast there as others do.
    """
    precisions = PRECISIONS if placement == "rows" else ("fp32", "bf16_fp32")
    return [(name, precision) for precision in precisions for name in PRECISIONS[precision].cases(world_size)]


def batch(step: int, rank: int) -> int:
    """The number of a rank's batch at a step; its parity is the rank's."""
    return rank + 10 * step


def named(check: Callable[[], None], *what: object) -> None:
    """Run `check`; its error says what was checked."""
    try:
        check()
    except BaseException as error:
        error.add_note(f"while checking {', '.join(map(str, what))}")
        raise


class Step(NamedTuple):
    """What one process has before and after an optimizer step, by parameter name."""

    grads: dict[str, Tensor]
    params: dict[str, Tensor]


@functools.cache
def reference_steps(name: str, precision: str, world_size: int) -> list[Step]:
    """Two steps of SGD in one process. Computed before the ranks are forked, once for all strategies."""
    dtypes = PRECISIONS[precision]
    case = dtypes.cases(world_size)[name]
    model, steps = case.build(), []
    for step in range(1 if name in INTEGERS else 2):  # after a step they are no longer integers
        grads = oracle_grads(
            model,
            lambda m, r, step=step: case.loss(m, batch(step, r)),
            world_size,
            param_dtype=dtypes.param_dtype,
            reduce_dtype=dtypes.reduce_dtype,
        )
        with torch.no_grad():
            for param_name, grad in grads.items():
                model.get_parameter(param_name).sub_(grad, alpha=dtypes.learning_rate)
        steps.append(Step(grads, {n: param.detach().clone() for n, param in model.named_parameters()}))
    return steps


@pytest.mark.parametrize(("strategy", "world_size", "placement"), RUNS)
def test_gradients_and_steps_equal_those_of_one_process(
    strategy: str, world_size: int, placement: str
) -> None:
    def trains(name: str, precision: str, rank: int, options: Options) -> None:
        dtypes = PRECISIONS[precision]
        case = dtypes.cases(world_size)[name]
        model = case.sharded(fully_shard, mp_policy=dtypes.policy, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=dtypes.learning_rate)
        for step, expected in enumerate(reference_steps(name, precision, world_size)):
            start_from_initial_buffers(model, case)
            optimizer.zero_grad()
            case.loss(model, batch(step, rank)).backward()
            assert_grads_equal(model, expected.grads, world_size)
            optimizer.step()
            assert_params_equal(model, expected.params, world_size)

    def check(rank: int, world_size: int) -> None:
        options = options_of(strategy, world_size, placement)
        for run in runs:
            named(lambda run=run: trains(*run, rank, options), *run)

    runs = runs_at(world_size, placement)
    for run in runs:
        reference_steps(*run, world_size)  # kept by the cache for all ranks
    run_ranks(check, world_size)


def start_from_initial_buffers(model: nn.Module, case: Case) -> None:
    """The reference runs every batch on the buffers that the model was built with."""
    for buffer, initial in zip(model.buffers(), case.build().buffers(), strict=True):
        buffer.copy_(initial)


def assert_params_equal(model: nn.Module, expected: dict[str, Tensor], world_size: int) -> None:
    for name, param in model.named_parameters():
        gathered = param.full_tensor() if isinstance(param, DTensor) else param
        if world_size <= 2:
            assert torch.equal(gathered, expected[name]), f"{name} differs after a step"
        else:
            torch.testing.assert_close(gathered, expected[name], rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- accumulation


@functools.cache
def grads_of_batches(
    name: str, precision: str, world_size: int, num_steps: int
) -> list[list[dict[str, Tensor]]]:
    """[step][rank] -> the gradients of that batch alone, unreduced, exact in the parameters' dtype."""
    dtypes = PRECISIONS[precision]
    case = dtypes.cases(world_size)[name]

    def grads_of(number: int) -> dict[str, Tensor]:
        return oracle_grads(
            case.build(), lambda m, _: case.loss(m, number), 1, param_dtype=dtypes.param_dtype
        )

    return [[grads_of(batch(step, rank)) for rank in range(world_size)] for step in range(num_steps)]


def total(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum in list order, each addition rounded to `dtype`."""
    result = grads[0].to(dtype)
    for grad in grads[1:]:
        result = result + grad.to(dtype)
    return result


def synced(of_step: list[list[Tensor]], dtype: torch.dtype) -> Tensor:
    """Reduced at every step; `.grad` adds the means in the parameter's own dtype."""
    return total([mean(of_rank, dtype) for of_rank in of_step], torch.float32)


def unsynced(of_step: list[list[Tensor]], dtype: torch.dtype) -> Tensor:
    """Each rank adds its steps to a buffer of the reduce dtype; one reduction at the end."""

    def added(steps: Sequence[Tensor]) -> Tensor:
        buffer = steps[0].to(dtype, copy=True)
        for grad in steps[1:]:
            buffer.add_(grad)  # rounded once, where the gradient is wider
        return buffer

    return mean([added(steps) for steps in zip(*of_step, strict=True)], dtype)


def reduced_late(of_step: list[list[Tensor]], dtype: torch.dtype) -> Tensor:
    """Over shards at every step, in the reduce dtype; over replicas at the end."""
    return mean([total(steps, dtype) for steps in zip(*of_step, strict=True)], dtype)


def mean(of_rank: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (total(of_rank, dtype) / len(of_rank)).float()


def only_last_synced(model: nn.Module, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def only_last_all_reduced(model: nn.Module, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


def combined(
    combine: Callable[[list[list[Tensor]], torch.dtype], Tensor],
    of_step: list[list[dict[str, Tensor]]],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    names = of_step[0][0]
    return {name: combine([[grads[name] for grads in ranks] for ranks in of_step], dtype) for name in names}


ACCUMULATIONS = {
    "synced": (lambda model, is_last: None, synced),
    "unsynced": (only_last_synced, unsynced),
    "unsynced_kept": (
        lambda model, is_last: (only_last_synced(model, is_last), model.set_reshard_after_backward(is_last)),
        unsynced,
    ),
    "all_reduce_last": (only_last_all_reduced, reduced_late),
}
ACCUMULATION_RUNS = [
    ("full", 2, "synced", "rows"),
    ("full", 2, "unsynced", "rows"),
    ("full", 3, "unsynced", "rows"),
    ("kept", 2, "unsynced_kept", "rows"),
    ("copies", 2, "unsynced", "rows"),
    ("copies", 2, "all_reduce_last", "rows"),
    ("hybrid", 4, "all_reduce_last", "rows"),
    ("halves", 4, "unsynced", "rows"),
    ("full", 2, "synced", "mixed"),
    ("full", 3, "unsynced", "ragged"),
    ("kept", 2, "unsynced_kept", "mixed"),
    ("hybrid", 4, "all_reduce_last", "mixed"),
]


@pytest.mark.parametrize(("strategy", "world_size", "accumulation", "placement"), ACCUMULATION_RUNS)
def test_accumulated_gradients_equal_those_of_one_process(
    strategy: str, world_size: int, accumulation: str, placement: str
) -> None:
    prepare, combine = ACCUMULATIONS[accumulation]
    references = {
        (name, precision): combined(
            combine, grads_of_batches(name, precision, world_size, 3), PRECISIONS[precision].adds_in
        )
        for name, precision in runs_at(world_size, placement)
        if PRECISIONS[precision].param_dtype != torch.float16  # divided before each sum: other roundings
    }

    def accumulates(name: str, precision: str, rank: int, options: Options) -> None:
        dtypes = PRECISIONS[precision]
        case = dtypes.cases(world_size)[name]
        model = case.sharded(fully_shard, mp_policy=dtypes.policy, **options)
        for step in range(3):
            prepare(model, step == 2)
            start_from_initial_buffers(model, case)
            case.loss(model, batch(step, rank)).backward()
        assert_grads_equal(model, references[name, precision], world_size)

    def check(rank: int, world_size: int) -> None:
        options = options_of(strategy, world_size, placement)
        for run in references:
            named(lambda run=run: accumulates(*run, rank, options), *run)

    run_ranks(check, world_size)


def test_synced_and_unsynced_backwards_mix() -> None:
    """Reduced, not, not, reduced without zero_grad: the plain sum of four batches."""
    order = (True, False, False, True)
    first, *rest = grads_of_batches("mlp", "fp32", 2, len(order))
    at_once = combined(synced, [first], torch.float32)
    later = combined(unsynced, rest, torch.float32)
    expected = {name: at_once[name] + later[name] for name in at_once}

    def check(rank: int, world_size: int) -> None:
        case = CASES["mlp"]
        model = case.sharded(fully_shard, mesh=flat(world_size))
        for step, is_synced in enumerate(order):
            model.set_requires_gradient_sync(is_synced)
            case.loss(model, batch(step, rank)).backward()
        assert_grads_equal(model, expected, world_size)

    run_ranks(check, 2)


def test_small_summands_survive_in_the_reduce_dtype() -> None:
    """256 + 1 - 256 is 1 in float32 and 0 in bfloat16: unsynced gradients add up in the reduce dtype."""

    def check(rank: int, world_size: int) -> None:
        for reduce_dtype, expected in ((torch.float32, 1.0), (torch.bfloat16, 0.0)):
            model = nn.Linear(1, 4, bias=False)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            fully_shard(model, mp_policy=policy)
            for step, value in enumerate((256.0, 1.0, -256.0)):
                model.set_requires_gradient_sync(step == 2)
                model(torch.full((1, 1), value)).sum().backward()
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 1), expected))

    run_ranks(check, 2)


def test_every_layer_below_a_unit_computes_in_its_dtypes() -> None:
    """Computed in bfloat16; weights, gradients and optimizer state stay float32, so a small step is kept."""

    def check(rank: int, world_size: int) -> None:
        seen = []
        model = MLP(7, 9, 3)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
        )
        fully_shard(model, mp_policy=policy)
        model.layers[0].register_forward_hook(
            lambda module, args, output: seen.append((module.weight.dtype, args[0].dtype, output.dtype))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        before = [param.full_tensor().clone() for param in model.parameters()]
        output = model(normal_batch(rank, 4, 7))
        output.square().mean().backward()
        optimizer.step()
        assert output.dtype == torch.float64
        assert seen == [(torch.bfloat16,) * 3]
        for param, old in zip(model.parameters(), before, strict=True):
            assert param.dtype == param.grad.dtype == optimizer.state[param]["exp_avg"].dtype == torch.float32
            assert (param.full_tensor() != old).any()

    run_ranks(check, 2)
