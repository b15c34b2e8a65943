"""Programs that nobody thought of train like their unsharded twins.

`make test` draws NUM_PROGRAMS for each world size, always the same. More by hand:

    RANDOM_PROGRAMS=2000 python -m pytest tests/parity/test_random_programs.py
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit import Blocks, FSDPModule, fully_shard
from tests.support.programs import Node, Program, build, choose, draw, failing, rows_of, shard
from tests.support.ranks import RankError, run_ranks

NUM_PROGRAMS = {2: 80, 3: 60, 4: 30}  # by world size
BY_HAND = int(os.environ.get("RANDOM_PROGRAMS", "0"))
NUM_AT_ONCE = 40  # programs that one group of forked ranks runs
SHRINK_S = 60.0
NUM_ROWS = 4

FOUND = [  # programs that once failed
    Program(
        Node("by_turn", (Node("linear", unit=True), Node("norm"))),
        mesh=(2, 1),
        micro_batches=("shard", "all"),
    ),
    Program(Node("chain", (Node("linear", unit=True),) * 3), fails=("backward", 5)),
    Program(Node("linear"), placement=Blocks.elements()),
    Program(Node("group", (Node("linear"), Node("linear"))), placement=Blocks(1, required=False)),
    Program(Node("by_turn", (Node("linear", unit=True), Node("norm"))), evaluates=True, prefetch=((0, 1),)),
    Program(Node("chain", (Node("linear", unit=True, reshard=2),)), mesh=(4,), evaluates=True),
    Program(Node("recompute", (Node("linear"), Node("drop", (Node("linear"),), unit=True)))),
]


@pytest.mark.parametrize("program", FOUND, ids=repr)
def test_a_program_that_once_failed_trains_like_its_unsharded_twin(program: Program) -> None:
    run_ranks(_run, math.prod(program.mesh), [program])


@pytest.mark.timeout(0 if BY_HAND else 240)
@pytest.mark.parametrize("world_size", NUM_PROGRAMS)
def test_a_random_program_trains_like_its_unsharded_twin(world_size: int) -> None:
    drawn: dict[Program, None] = {}
    _for_each_program(world_size, drawn.setdefault)
    results: dict[Program, RankError | None] = {}
    failure: RankError | None = None
    programs = list(drawn)
    for start in range(0, len(programs), NUM_AT_ONCE):
        batch = programs[start : start + NUM_AT_ONCE]
        if (error := _failure_of(batch, world_size)) is None:
            results.update(dict.fromkeys(batch))
        failure = failure or error
    if failure is not None:
        _for_each_program(world_size, partial(_shrink, results, world_size, time.monotonic() + SHRINK_S))
        raise failure  # none of the batch fails alone


def _shrink(
    results: dict[Program, RankError | None], world_size: int, deadline: float, program: Program
) -> None:
    """Run one program alone, once, and raise its failure: hypothesis then looks for a simpler one."""
    if program not in results:
        is_late = any(results.values()) and time.monotonic() > deadline
        results[program] = None if is_late else _failure_of([program], world_size)
    if (error := results[program]) is not None:
        raise error


def _for_each_program(world_size: int, visit: Callable[[Program], object]) -> None:
    """Draw programs, the same in every run, and shrink one that fails."""

    @settings(
        max_examples=BY_HAND or NUM_PROGRAMS[world_size],
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(draw(world_size))
    def run(program: Program) -> None:
        visit(program)

    run()


def _failure_of(batch: list[Program], world_size: int) -> RankError | None:
    """What happens when forked ranks run `batch`."""
    try:
        run_ranks(_run, world_size, batch, timeout=20 + len(batch))
    except RankError as error:
        return error
    return None


def _run(rank: int, world_size: int, batch: list[Program]) -> None:
    for program in batch:
        try:
            _check(program, rank, world_size)
        except Exception as error:
            error.add_note(f"in {program}")
            raise


def _check(program: Program, rank: int, world_size: int) -> None:
    """Two steps of SGD: losses, gradients of parameters and inputs, parameters, and what stays behind."""
    twin, model = Twin(program, world_size), build(program)
    units = shard(program, model, _mesh(program.mesh))
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    if program.fails is not None:
        with failing(program, model):
            loss = rows_of(model(_inputs(program, rank, 9, 0))).float().sum()
            if loss.requires_grad:
                loss.backward()
        optimizer.zero_grad()
    for step in range(2):
        for turn, sync in enumerate(program.micro_batches):
            place = f"step {step}, turn {turn}"
            units[0].set_is_last_backward(not program.defers or turn == len(program.micro_batches) - 1)
            units[0].set_requires_gradient_sync(sync != "none")
            units[0].set_requires_all_reduce(sync == "all")
            _evaluate(twin, model, rank, step, turn)
            expected, expected_input = twin.run(step, turn, sync)[rank]
            inputs, loss = _loss(model, program, rank, step, turn)
            _assert_close(loss, expected, twin.tolerance(step, loss=True), f"{place}: loss")
            if loss.requires_grad:
                loss.backward()
            allowed = twin.tolerance(step) * max(1.0, twin.scale)
            _assert_close(inputs.grad, expected_input, allowed, f"{place}: gradient of the input")
            if not program.keeps and loss.requires_grad:
                _assert_at_rest(model, place)
            _evaluate(twin, model, rank, step, turn + 1)
        for name, param in params.items():
            allowed = twin.tolerance(step) * twin.scale
            _assert_close(
                _full(param.grad), twin.params[name].grad, allowed, f"step {step}: gradient of {name}"
            )
        for each in (optimizer, twin.optimizer):
            each.step()
            each.zero_grad()
        for name, param in params.items():
            allowed = twin.tolerance(step) * max(1.0, twin.scale)
            _assert_close(_full(param), twin.params[name], allowed, f"step {step}: {name}")
            if program.flips:
                param.requires_grad_(not param.requires_grad)
                twin.params[name].requires_grad_(param.requires_grad)
        assert list(params) == [name for name, _ in model.named_parameters()]


def _evaluate(twin: Twin, model: nn.Module, rank: int, step: int, turn: int) -> None:
    """A forward that no backward follows, if the program has them."""
    if twin.program.evaluates:
        with torch.no_grad():
            _, loss = _loss(model, twin.program, rank, step, turn)
            _, expected = _loss(twin.computed({}), twin.program, rank, step, turn)
        _assert_close(loss, expected, twin.tolerance(step, loss=True), "loss without grad")
        if not twin.program.keeps:
            _assert_at_rest(model, "after a forward without grad")


class Twin:
    """The unsharded model, trained on every rank's batches one after the other."""

    def __init__(self, program: Program, world_size: int) -> None:
        self.program, self.model = program, build(program)
        self.params = dict(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(self.params.values(), lr=0.1)
        self.held: list[dict[str, Tensor]] = [{} for _ in range(world_size)]  # not yet reduced, by rank
        self.scale = 0.0  # of the largest gradient that a rank had, of parameters or inputs

    def run(self, step: int, turn: int, sync: str) -> list[tuple[Tensor, Tensor | None]]:
        """One micro-batch: the loss and the input's gradient of every rank."""
        results = []
        for rank, held in enumerate(self.held):
            inputs, loss = _loss(self.computed(held), self.program, rank, step, turn)
            if loss.requires_grad:
                loss.backward()
            if inputs.grad is not None:
                self.scale = max(self.scale, inputs.grad.abs().max().item())
            results.append((loss.detach(), inputs.grad))
        if sync == "all" and loss.requires_grad:
            self._reduce()
        return results

    def computed(self, held: dict[str, Tensor]) -> nn.Module:
        """A copy in the compute dtype, whose gradients gather in `held`, in the reduce dtype."""
        program, model = self.program, copy.deepcopy(self.model)
        for name, param in model.named_parameters():
            param.data = param.data.to(program.param_dtype or param.dtype)
            dtype = program.reduce_dtype or param.dtype

            def take(param: Tensor, name: str = name, dtype: torch.dtype = dtype) -> None:
                grad, param.grad = param.grad, None
                held[name] = held[name].add_(grad) if name in held else grad.to(dtype)

            if param.requires_grad:
                param.register_post_accumulate_grad_hook(take)
        model.register_forward_pre_hook(
            lambda _, args: tuple(x.to(program.param_dtype or x.dtype) for x in args)
        )
        return model

    def tolerance(self, step: int, *, loss: bool = False) -> float:
        """What may differ, by a factor: nothing where sums have two summands, else their rounding.

        Of a tensor that several branches read, a unit adds up its own gradients first, the twin one by one;
        and a unit that runs twice reduces what earlier micro-batches left on its own.
        """
        program = self.program
        if loss and step == 0:
            return 0.0
        if len(self.held) == 2 and "shard" not in program.micro_batches and not program.root.forks:
            return 0.0
        computed = {program.param_dtype} if step or program.root.forks else set()
        return 5e-2 if torch.bfloat16 in {program.reduce_dtype or program.param_dtype, *computed} else 1e-4

    def _reduce(self) -> None:
        for name, param in self.params.items():
            of_ranks = [held.pop(name) for held in self.held if name in held]
            if self.program.fills_unused and param.requires_grad and not of_ranks:
                of_ranks = [torch.zeros_like(param)]
            if of_ranks:
                self.scale = max(self.scale, *(grad.abs().max().item() for grad in of_ranks))
                total = sum(of_ranks[1:], start=of_ranks[0]) / len(self.held)
                param.grad = (
                    total.to(param.dtype) if param.grad is None else param.grad + total.to(param.dtype)
                )


def _loss(model: nn.Module, program: Program, rank: int, step: int, turn: int) -> tuple[Tensor, Tensor]:
    """The inputs of this rank and turn, and the loss on them."""
    inputs = _inputs(program, rank, step, turn)
    choose(model, rank if program.fills_unused else 0, turn)
    return inputs, rows_of(model(inputs)).float().square().mean()


def _inputs(program: Program, rank: int, step: int, turn: int) -> Tensor:
    """(NUM_ROWS, width), others on every rank and turn."""
    generator = torch.Generator().manual_seed(100 * step + 10 * turn + rank)
    inputs = torch.randn(NUM_ROWS, program.width, generator=generator)
    return inputs.requires_grad_(program.needs_input_grad and torch.is_grad_enabled())


def _assert_at_rest(model: nn.Module, place: str) -> None:
    """All units hold their shards, and no gathered byte is left."""
    held = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    assert not held, f"{place}: still gathered: {held}"
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for bucket in [bucket for unit in units for bucket in fully_shard.state(unit).unit.buckets]:
        left = (
            0 if bucket.gather.unsharded is None else bucket.gather.unsharded.flat.untyped_storage().nbytes()
        )
        assert not left, f"{place}: {bucket.label} still has {left} gathered bytes"


def _assert_close(got: Tensor | None, expected: Tensor | None, allowed: float, what: str) -> None:
    assert (got is None) == (expected is None), f"{what}: got {got}, expected {expected}"
    if got is None or expected is None:
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), f"{what}: {got.dtype}, {got.shape}"
    difference = (got - expected).abs().max().item()
    assert difference <= allowed, f"{what}: off by {difference:.3e}, allowed {allowed:.3e}"


def _full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
