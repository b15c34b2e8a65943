"""The order of streams, where there are none: training on a simulated device (`support/stream_order.py`).

A wait that is missing, or memory that comes back too early, computes right numbers on the CPU and wrong ones,
now and then, on a GPU. Each program below trains once plainly and once with the runtime of a GPU. Nothing may
race, no work may be left unwaited, and the parameters must be the same to the bit. Then waits are taken out
of the runtime, one at a time, and the simulation has to notice every one of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardkit import (
    Blocks,
    MixedPrecisionPolicy,
    RaggedShard,
    clip_grad_norm_,
    distribute_tensor,
    fully_shard,
    redistribute,
)
from shardkit.buffer import FlatBuffer
from shardkit.optim import SOAP, AdamW8bit, Muon, Shampoo
from shardkit.quantized import BlockQuantizer, gather_quantized
from shardkit.reduction import Reduction
from shardkit.streams import Streams
from tests.support.ranks import run_ranks
from tests.support.stream_group import SimulatedWork, init_simulated_group
from tests.support.stream_order import Simulation, simulated_streams

DIM, NUM_BLOCKS, NUM_STEPS = 16, 3, 3
WIDE = 5120  # so that a gradient is too large to wait for its unit's sweep
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Two matrices around a residual, and two that a step may leave out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, width), nn.Linear(width, DIM)
        self.even, self.odd = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, branch: int | None) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.even(x) + self.odd(x) if branch is None else (self.odd if branch % 2 else self.even)(x)


class Net(nn.Module):
    """Three blocks between two matrices."""

    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.embed, self.head, self.recompute = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), recompute
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor, branch: int | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, branch, use_reentrant=False) if self.recompute else block(x, branch)
        return self.head(x)


Micro = Callable[[Net, int, Callable[[], Tensor]], None]
Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def backward(model: Net, micro: int, loss: Callable[[], Tensor]) -> None:
    loss().backward()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def nothing(model: Net) -> None:
    """No settings."""


@dataclass(frozen=True)
class Program:
    """How a model is sharded, set up and stepped."""

    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = (2,)
    prepare: Callable[[Net], object] = nothing
    micro: Micro = backward
    num_micros: int = 1
    optimize: Optimize = adamw
    width: int = WIDE
    branches: bool = False
    recompute: bool = False
    clips: bool = True

    def train(self, rank: int) -> dict[str, Tensor]:
        """The parameters after all steps, whole. The host never waits."""
        torch.manual_seed(1)
        model = Net(self.width, self.recompute)
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=("replicate", "shard")[-len(self.mesh) :])
        for module in (*model.blocks, model):
            fully_shard(module, mesh, **self.options)
        self.prepare(model)
        optimizer = self.optimize(model)
        for step in range(NUM_STEPS):
            for micro in range(self.num_micros):
                seed = 100 * step + 10 * micro + rank
                x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))
                branch = step + rank if self.branches else None
                self.micro(model, micro, lambda x=x, branch=branch: model(x, branch).square().mean())
            if self.clips:
                clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, DIM))
        model.reshard()
        return {name: whole(param) for name, param in model.named_parameters()}


def whole(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return param.detach().full_tensor()


def micros_without_sync(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    model.set_requires_gradient_sync(micro == 2)
    loss().backward()


def micros_without_all_reduce(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    model.set_requires_all_reduce(micro == 2)
    loss().backward()


def micros_in_flight(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    model.set_is_last_backward(micro == 2)
    model.set_reshard_after_backward(micro == 2)
    loss().backward()


def two_forwards_then_backwards(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        loss()
    (loss() + loss()).backward()


def fail_once(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    """Raise in backward, on all ranks, when the first units are being reduced; then start anew."""

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.blocks[0].register_forward_hook(watch)
    with pytest.raises(ArithmeticError):
        loss().backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    loss().backward()


def freeze_in_turns(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    for is_trained in (True, False, True):
        model.blocks[1].up.requires_grad_(is_trained)
        loss().backward()


def unshard_by_hand(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    handle = model.blocks[0].unshard(async_op=True)
    model.blocks[1].unshard()
    handle.wait()
    model.blocks[0].weight_sum = sum(param.sum() for param in model.blocks[0].parameters())
    for block in model.blocks[:2]:
        block.reshard()
    loss().backward()


def give_post_optim_event(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    streams = model._unit.tree.streams
    if streams.runs_ahead:
        model.set_post_optim_event(streams.mark())
    loss().backward()


def redistribute_a_matrix(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    with torch.no_grad():
        for block in model.blocks:
            weight = block.up.weight
            moved = redistribute(weight, placements=[RaggedShard((0,), (1, WIDE - 1))])
            weight.add_(redistribute(moved * 0.5, placements=weight.placements))


def save_and_load(model: Any, micro: int, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def prefetch_two(model: Any) -> None:
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])


def many_reductions(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(2)


def fill_unused(model: Any) -> None:
    model.set_reduce_scatter_unused_params(True)


def freeze(model: Net) -> None:
    model.blocks[1].up.requires_grad_(False)
    model.embed.requires_grad_(False)


def step_in_backward(model: nn.Module) -> None:
    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.01)
        param.grad = None

    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
        param.register_post_accumulate_grad_hook(step)


def quantise(model: Net) -> None:
    gather_quantized(model, BlockQuantizer((1, 4), torch.int8))


def group_for_reductions(model: Any) -> None:
    model.set_separate_reduce_scatter_group()


def hook_rows(model: Any) -> None:
    for block in model.blocks:
        block.set_all_reduce_hook(lambda row: row.mul_(0.5))


def custom_comms(model: Any) -> None:
    for block in model.blocks:
        block.set_custom_all_gather(Comm())
        block.set_custom_reduce_scatter(Comm())


class Comm:
    """What a user may give for collectives: buffers of its own, and c10d's calls."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        if op is None:
            group._allgather_base(output_tensor, input_tensor).wait()
        else:
            options = torch._C._distributed_c10d.ReduceScatterOptions()
            options.reduceOp = op
            group._reduce_scatter_base(output_tensor, input_tensor, options).wait()


def of_matrices(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> Optimize:
    """An optimizer for matrices, with AdamW for vectors; buckets so small that many are under way."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        groups = [
            {"params": [(name, p) for name, p in named if p.ndim > 1]},
            {"params": [(name, p) for name, p in named if p.ndim < 2], "algorithm": "adamw"},
        ]
        return kind(groups, lr=0.01, bucket_bytes=4096, **settings)

    return make


muon = of_matrices(Muon, ns_dtype=torch.float32)
RAGGED = {"shard_placement_fn": lambda param: Blocks(4) if param.ndim > 1 else None}
PROGRAMS = {
    "plain": Program(),
    "columns": Program({"shard_placement_fn": lambda p: Shard(p.ndim - 1)}),
    "ragged": Program(RAGGED),
    "bf16": Program({"mp_policy": BF16}),
    "ragged bf16": Program(RAGGED | {"mp_policy": BF16}),
    "kept": Program({"reshard_after_forward": False}),
    "kept in part": Program({"reshard_after_forward": 2}, mesh=(4,)),
    "ragged kept in part": Program(RAGGED | {"reshard_after_forward": 2}, mesh=(4,)),
    "hsdp": Program(mesh=(2, 2)),
    "hsdp bf16": Program({"mp_policy": BF16}, mesh=(2, 2)),
    "replicas": Program(mesh=(2, 1)),
    "micros without sync": Program(micro=micros_without_sync, num_micros=3),
    "micros without all-reduce": Program(mesh=(2, 2), micro=micros_without_all_reduce, num_micros=3),
    "micros in flight": Program(micro=micros_in_flight, num_micros=3),
    "two forwards": Program(micro=two_forwards_then_backwards),
    "failing backward": Program(prepare=group_for_reductions, micro=fail_once),
    "unshard": Program(micro=unshard_by_hand),
    "post-optim event": Program(micro=give_post_optim_event),
    "redistribute": Program(micro=redistribute_a_matrix),
    "load": Program(micro=save_and_load),
    "prefetch": Program(prepare=prefetch_two),
    "many reductions": Program(prepare=many_reductions),
    "uneven use": Program(prepare=fill_unused, branches=True),
    "uneven use, two forwards": Program(
        prepare=fill_unused, branches=True, micro=two_forwards_then_backwards
    ),
    "uneven use, recompute": Program(prepare=fill_unused, branches=True, recompute=True),
    "frozen": Program(prepare=freeze),
    "frozen in turns": Program(micro=freeze_in_turns),
    "step in backward": Program(prepare=step_in_backward),
    "step in backward, hsdp bf16": Program({"mp_policy": BF16}, mesh=(2, 2), prepare=step_in_backward),
    "quantised": Program(RAGGED, prepare=quantise),
    "group for reductions": Program(prepare=group_for_reductions),
    "hook": Program(prepare=hook_rows),
    "comms": Program(prepare=custom_comms),
    "recompute": Program(recompute=True),
    "muon": Program(optimize=muon, width=24),
    "muon ragged": Program(RAGGED, optimize=muon, width=24),
    "muon hsdp": Program(optimize=muon, width=24, mesh=(2, 2)),
    "shampoo": Program(optimize=of_matrices(Shampoo, block=12, update_every=2), width=24),
    "soap": Program(optimize=of_matrices(SOAP, block=12, update_every=2), width=24),
    "adamw 8 bit": Program(RAGGED, optimize=lambda m: AdamW8bit(m.parameters(), lr=0.01, min_numel=64)),
}


def run(program: Program, rank: int, *broken: Any) -> tuple[Simulation, dict[str, Tensor]]:
    """Train on the simulated device, with parts of the runtime replaced."""
    with ExitStack() as stack:
        simulation = stack.enter_context(simulated_streams())
        for replaced in broken:
            stack.enter_context(replaced)
        init_simulated_group(simulation)
        return simulation, program.train(rank)


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_on_streams_races_nowhere_and_gives_the_same_parameters(name: str) -> None:
    program = PROGRAMS[name]

    def body(rank: int, world_size: int) -> tuple[list[str], list[str], int, int]:
        expected = program.train(rank)
        simulation, trained = run(program, rank)
        others = [key for key, value in expected.items() if not torch.equal(trained[key], value)]
        return [*simulation.races], others, len(simulation.unwaited), simulation.num_accesses

    for races, others, num_unwaited, num_accesses in run_ranks(body, math.prod(program.mesh)):
        assert num_accesses > 500, "the simulation saw nothing"
        assert not races, "\n".join(races)
        assert not others and not num_unwaited


def test_messages_are_never_the_first_that_a_group_is_used_for() -> None:
    def body(rank: int, world_size: int) -> tuple[list[str], Tensor]:
        with simulated_streams() as simulation:
            init_simulated_group(simulation)
            mesh, full = init_device_mesh("cpu", (2, 2)), torch.arange(24.0).view(6, 4)
            cut = distribute_tensor(full, mesh, [Replicate(), RaggedShard((0,), (6, 0))])
            moved = redistribute(cut, placements=[RaggedShard((0,), (1, 5)), Replicate()])
            return [*simulation.races], whole(moved)

    for races, moved in run_ranks(body, 4):
        assert not races and torch.equal(moved, torch.arange(24.0).view(6, 4))


@pytest.mark.parametrize("is_bound", [False, True])
def test_messages_among_some_of_the_ranks_need_no_others(is_bound: bool) -> None:
    """As of one stage of a pipeline; a mesh that is made anew takes the group that is there."""

    def body(rank: int, world_size: int) -> tuple[list[str], int]:
        with simulated_streams() as simulation:
            init_simulated_group(simulation)
            meshes = [DeviceMesh("cpu", [[0, 1], [2, 3]]) for _ in range(2)]
            if is_bound:
                dist.group.WORLD.bound_device_id = torch.device("cpu:0")
            if rank == 4:
                return [], 1
            num_groups = []
            for mesh in meshes:
                cut = distribute_tensor(torch.ones(6, 4), mesh, [Replicate(), RaggedShard((0,), (6, 0))])
                redistribute(cut, placements=[RaggedShard((0,), (1, 5)), Replicate()])
                num_groups.append(len(simulation.device.groups))
            return [*simulation.races], len(set(num_groups))

    for races, num_counts in run_ranks(body, 5):
        assert not races and num_counts == 1


def no_wait_on(stream: str) -> Any:
    """Let one stream of a tree wait for nothing that the runtime asks it to wait for."""
    wait = Streams.wait

    def some(streams: Any, event: Any) -> None:
        if not streams._module.current_stream().name.startswith(stream):
            wait(streams, event)

    return patch.object(Streams, "wait", some)


def free_at_once(streams: Streams, buffer: FlatBuffer) -> None:
    buffer.free()


def reclaim_unwaited(streams: Streams, *, keep: int) -> None:
    while len(streams._retired) > keep:
        streams._retired.popleft()[1].free()


def finish_unwaited(reduction: Reduction) -> None:
    reduction._rows = reduction._row = None
    reduction.bucket.grads.free()


BROKEN: dict[str, tuple[str, Any, str]] = {
    "compute does not wait for gathers": (
        "plain",
        no_wait_on("compute"),
        "on compute does not wait for write by .* .gather.py",
    ),
    "reductions do not wait for gradients": (
        "plain",
        no_wait_on("reduce_scatter"),
        "reduce_scatter .* on compute",
    ),
    "all-reduces do not wait": (
        "hsdp",
        no_wait_on("all_reduce"),
        "all_reduce .* does not wait for write by reduce_sc",
    ),
    "gathers do not wait for the step": (
        "plain",
        patch.object(Streams, "gather_after", lambda *_: None),
        "all_gather .* does not wait for write by aten::_foreach_addcdiv_",
    ),
    "gathers do not wait for a cast of the step": (
        "bf16",
        patch.object(Streams, "gather_after", lambda *_: None),
        "read by aten::copy_ .* does not wait for write by aten::_foreach_addcdiv_",
    ),
    "gathered bytes are freed at once": (
        "plain",
        patch.object(Streams, "free_later", free_at_once),
        "all_gather .* in bytes since freed on compute",
    ),
    "gathered bytes are freed unwaited": (
        "ragged",
        patch.object(Streams, "reclaim", reclaim_unwaited),
        "all_gather .* in bytes since freed on compute",
    ),
    "gradients are not waited for": (
        "plain",
        patch.object(Reduction, "finish", finish_unwaited),
        "on compute does not wait for .* by reduce_scatter",
    ),
    "kept pieces are not waited for": (
        "kept in part",
        patch.object(Streams, "reclaim", reclaim_unwaited),
        "all_gather",
    ),
    "messages are not waited for": (
        "muon",
        patch.object(SimulatedWork, "wait", lambda work, timeout=None: work.finish()),
        "read by .* on compute .* by recv",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_wait_that_is_missing_is_noticed(what: str) -> None:
    name, broken, report = BROKEN[what]

    def body(rank: int, world_size: int) -> list[str]:
        return [*run(PROGRAMS[name], rank, broken)[0].races]

    for races in run_ranks(body, math.prod(PROGRAMS[name].mesh)):
        assert any(re.search(report, race) for race in races), "\n".join(races[:20]) or "no race"
