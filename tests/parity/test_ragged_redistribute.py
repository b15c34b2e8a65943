"""Redistribution between real ranks: the right data, no byte too many, gradients, handles, errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import shardkit.exchange as moving
from shardkit.placement import RaggedShard
from shardkit.ragged import RaggedTensor, Redistribution, distribute_tensor, redistribute
from tests.parity.ragged_layouts import values
from tests.support.ranks import run_ranks

SHAPE = (6, 4)
LAYOUTS: dict[tuple[int, ...], list[tuple[Placement, ...]]] = {
    (3,): [
        (Replicate(),),
        (Shard(0),),
        (Shard(1),),
        (RaggedShard((0,), (1, 5, 0)),),
        (RaggedShard((0,), (0, 0, 6)),),
        (RaggedShard((0, 1), (7, 0, 17)),),
        (RaggedShard((), (0, 1, 0)),),
    ],
    (2, 2): [
        (Replicate(), Replicate()),
        (Shard(0), Shard(1)),
        (Replicate(), RaggedShard((0,), (1, 5))),
        (RaggedShard((0,), (2, 1)), Shard(0)),
        (RaggedShard((0,), (6, 0)), Shard(1)),
        (RaggedShard((0, 1), (5, 7)), Shard(1)),
        (RaggedShard((0,), (2, 4)), Replicate()),
    ],
}
PENDING: dict[tuple[int, ...], list[tuple[Placement, ...]]] = {
    (3,): [(Partial(),), (Partial("avg"),)],
    (2, 2): [(Partial(), Partial()), (Partial(), Shard(0)), (Replicate(), Partial()), (Partial(), Shard(1))],
}


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Elements that this rank receives and sends in point-to-point messages."""
    counts, original = [0, 0], moving._start

    def start(sends, receives, mesh, me, axes):  # type: ignore[no-untyped-def]
        counts[0] += sum(tensor.numel() for _, tensor in receives)
        counts[1] += sum(tensor.numel() for _, tensor in sends)
        assert all(tensor.numel() for _, tensor in (*sends, *receives)), "an empty message"
        return original(sends, receives, mesh, me, axes)

    moving._start = start
    try:
        yield counts
    finally:
        moving._start = original


def _is_ragged(*layouts: Sequence[Placement]) -> bool:
    return any(isinstance(p, RaggedShard) for layout in layouts for p in layout)


def _every_pair(rank: int, world_size: int, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = values(SHAPE)
    index = torch.arange(whole.numel(), dtype=torch.float64).view(SHAPE)
    for source, target in product(LAYOUTS[mesh_shape], repeat=2):
        if not _is_ragged(source, target):
            continue
        tensor, what = distribute_tensor(whole, mesh, source), f"{source} -> {target}"
        with _counted() as counts:
            moved = redistribute(tensor, target)
        wanted = distribute_tensor(whole, mesh, target)
        assert moved.placements == target, what
        assert type(moved) is (RaggedTensor if _is_ragged(target) else DTensor), what
        assert torch.equal(moved.to_local(), wanted.to_local()), what
        has = set(distribute_tensor(index, mesh, source).to_local().flatten().tolist())
        wants = set(distribute_tensor(index, mesh, target).to_local().flatten().tolist())
        assert counts[0] == len(wants - has), f"{what}: received {counts[0]}, needs {len(wants - has)}"
        if not has:
            assert counts[1] == 0, f"{what}: a rank that holds nothing sends"
        with _counted() as counts_async:
            handle = redistribute(tensor, target, async_op=True)
        assert counts_async == counts, what
        assert torch.equal(handle.wait().to_local(), wanted.to_local()), what
        sent = torch.tensor(counts)
        dist.all_reduce(sent)
        assert sent[0] == sent[1], what


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_every_layout_becomes_every_other_and_only_the_missing_elements_travel(mesh_shape):
    run_ranks(_every_pair, math.prod(mesh_shape), mesh_shape)


def _pending(rank: int, world_size: int, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for source, target in product(PENDING[mesh_shape], LAYOUTS[mesh_shape]):
        if not _is_ragged(target):
            continue
        what = f"{source} -> {target}"
        summands = [values(SHAPE, seed) * 12 for seed in range(world_size)]
        spread = tuple(Replicate() if isinstance(p, Partial) else p for p in source)
        local = distribute_tensor(values(SHAPE), mesh, spread).to_local()
        own, expected = _summands(mesh, source, summands)
        tensor = DTensor.from_local(
            _cut(own, mesh, source).contiguous(), mesh, source, shape=torch.Size(SHAPE), stride=(4, 1)
        )
        assert tensor.to_local().shape == local.shape
        with _counted() as counts:
            moved = redistribute(tensor, target)
        wanted = distribute_tensor(expected, mesh, target, src_data_rank=None)
        assert torch.equal(moved.to_local(), wanted.to_local()), what
        index = torch.arange(24, dtype=torch.float64).view(SHAPE)
        has = set(distribute_tensor(index, mesh, spread).to_local().flatten().tolist())
        wants = set(distribute_tensor(index, mesh, target).to_local().flatten().tolist())
        moving_axes = [
            axis
            for axis, (p, q) in enumerate(zip(source, target, strict=True))
            if isinstance(p, Partial) and not isinstance(q, Replicate)
        ]
        num_summands = math.prod(mesh.size(axis) for axis in moving_axes)
        needed = num_summands * len(wants) - len(wants & has)  # one of its own, where it has the element
        assert counts[0] == needed, f"{what}: received {counts[0]}, needs {needed}"


def _summands(
    mesh: DeviceMesh, source: tuple[Placement, ...], summands: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's own summand and the reduced tensor; ranks alike on pending axes share a summand."""
    place = 0
    count = 1
    mean = 1
    for axis, placement in enumerate(source):
        if isinstance(placement, Partial):
            place = place * mesh.size(axis) + mesh.get_coordinate()[axis]
            count *= mesh.size(axis)
            mean *= mesh.size(axis) if placement.reduce_op == "avg" else 1
    return summands[place], sum(summands[1:count], summands[0]) / mean


def _cut(whole: torch.Tensor, mesh: DeviceMesh, source: tuple[Placement, ...]) -> torch.Tensor:
    for axis, placement in enumerate(source):
        if isinstance(placement, Shard):
            whole = whole.chunk(mesh.size(axis), placement.dim)[mesh.get_coordinate()[axis]]
    return whole


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_pending_sums_and_means_are_reduced_into_every_ragged_layout(mesh_shape):
    run_ranks(_pending, math.prod(mesh_shape), mesh_shape)


def _uneven_tp(rank: int, world_size: int) -> None:
    """TP cuts 5 rows into 3 and 2, so each TP coordinate has units of its own."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = values((5, 4))
    first = mesh.get_coordinate()[1] == 0
    a = (RaggedShard((0,), (1, 2) if first else (2, 0)), Shard(0))
    b = (RaggedShard((0, 1), (5, 7) if first else (1, 7)), Shard(0))
    c = (RaggedShard((0,), (1, 2) if first else (1, 1)), Shard(0))  # as a on the first coordinate only
    for source, target in product((a, b, c, (Replicate(), Replicate()), (Shard(1), Shard(0))), repeat=2):
        if _is_ragged(source, target):
            moved = redistribute(distribute_tensor(whole, mesh, source), target)
            assert torch.equal(moved.full_tensor(), whole), f"{source} -> {target}"


def test_tensor_parallelism_that_divides_unevenly_keeps_units_of_its_own_on_each_coordinate():
    run_ranks(_uneven_tp, 4)


def _other_dims(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    first = mesh.get_coordinate()[1] == 0
    placement = RaggedShard((0,), (1, 1)) if first else RaggedShard((0, 1), (3, 1))
    tensor = RaggedTensor.from_local(
        torch.zeros(1, 2, 3) if first else torch.zeros(3 - 2 * mesh.get_coordinate()[0], 3),
        mesh,
        [placement, Shard(1)],
        shape=(2, 4, 3),
    )
    with pytest.raises(ValueError, match="the same dims on all of them"):
        tensor.full_tensor()


def test_a_tensor_cut_along_other_dims_on_some_tp_ranks_is_refused_on_all():
    run_ranks(_other_dims, 4)


def _gradients(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    whole, weight = values(SHAPE), values(SHAPE, 9)
    ragged, other = [RaggedShard((0,), (1, 5, 0))], [RaggedShard((0, 1), (7, 0, 17))]
    for target in ([Replicate()], [Shard(0)], [Shard(1)], other, ragged):
        leaf = distribute_tensor(whole, mesh, ragged).requires_grad_()
        moved = leaf.redistribute(placements=target)
        (moved * distribute_tensor(weight, mesh, target)).sum().backward()
        assert type(leaf.grad) is RaggedTensor
        assert leaf.grad.placements == tuple(ragged)
        assert torch.equal(leaf.grad.full_tensor(), weight)
    leaf = distribute_tensor(whole, mesh, ragged).requires_grad_()
    (leaf.full_tensor() * weight).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), weight)
    leaf = distribute_tensor(whole, mesh, ragged).requires_grad_()
    local = leaf.to_local()
    (local * distribute_tensor(weight, mesh, ragged).to_local()).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), weight)
    assert leaf.grad.placements == tuple(ragged)
    local = distribute_tensor(whole, mesh, ragged).to_local().clone().requires_grad_()
    tensor = RaggedTensor.from_local(local, mesh, ragged, shape=SHAPE)
    (tensor * distribute_tensor(weight, mesh, ragged)).sum().backward()
    assert torch.equal(local.grad, distribute_tensor(weight, mesh, ragged).to_local())
    pending = DTensor.from_local(whole / 3, mesh, [Partial()]).detach().requires_grad_()
    (redistribute(pending, ragged) * distribute_tensor(weight, mesh, ragged)).sum().backward()
    assert torch.equal(pending.grad.full_tensor(), weight)
    replicated = DTensor.from_local(whole, mesh, [Replicate()]).detach().requires_grad_()
    (redistribute(replicated, ragged) * distribute_tensor(weight, mesh, ragged)).sum().backward()
    assert torch.equal(replicated.grad.full_tensor(), weight)


def test_gradients_come_back_in_the_layout_their_tensor_has():
    run_ranks(_gradients, 3)


def _asynchronous(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    whole = [values(SHAPE, seed) for seed in range(3)]
    ragged = [RaggedShard((0,), (1, 5, 0))]
    tensors = [distribute_tensor(t, mesh, ragged) for t in whole]
    owners = [[RaggedShard((0,), tuple(6 * (r == owner) for r in range(3)))] for owner in range(3)]
    gathers = [t.redistribute(placements=p, async_op=True) for t, p in zip(tensors, owners, strict=True)]
    assert all(isinstance(gather, Redistribution) for gather in gathers)
    gathered = [gather.wait() for gather in gathers]
    for owner, tensor in enumerate(gathered):
        assert torch.equal(tensor.to_local(), whole[owner][: 6 * (rank == owner)])
    back = [t.redistribute(placements=ragged, async_op=True) for t in gathered]
    for handle, t in zip(back, whole, strict=True):
        assert torch.equal(handle.wait().full_tensor(), t)
    with pytest.raises(ValueError, match=r"async_op=True.*is not differentiable"):
        tensors[0].clone().requires_grad_().redistribute(placements=owners[0], async_op=True)


def test_several_redistributions_can_be_under_way_at_once():
    run_ranks(_asynchronous, 3)


def _memory(rank: int, world_size: int) -> None:
    """A gather allocates the full tensor and nothing else: pieces are received where they belong."""
    mesh = init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(values((300, 40)), mesh, [RaggedShard((0, 1), (7, 0, 11993))])
    allocated = _allocated_bytes(lambda: tensor.redistribute(placements=[Replicate()]))
    assert allocated == 300 * 40 * 8, allocated


def _allocated_bytes(run) -> int:  # type: ignore[no-untyped-def]
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        storages: dict[int, int]

        def __init__(self) -> None:
            super().__init__()
            self.storages, self.kept = {}, []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if "empty" in str(func) or "cat" in str(func) or "zeros" in str(func) or "clone" in str(func):
                self.kept.append(result)
                self.storages[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
            return result

    with Sizes() as sizes:
        run()
    return sum(sizes.storages.values())


def test_a_gather_needs_one_buffer_of_the_full_size():
    run_ranks(_memory, 3)


def _refusals(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    ragged = [RaggedShard((0,), (1, 5, 0))]
    tensor = distribute_tensor(values(SHAPE), mesh, ragged)
    with pytest.raises(ValueError, match="have 6 units, got 7"):
        redistribute(tensor, [RaggedShard((0,), (1, 5, 1))])
    with pytest.raises(ValueError, match="one placement for each of 1 mesh axes"):
        redistribute(tensor, [Replicate(), Replicate()])
    with pytest.raises(NotImplementedError, match="a Partial can be a source, not a target"):
        redistribute(tensor, [Partial()])
    with pytest.raises(NotImplementedError, match="only sums and means are reduced into a ragged layout"):
        redistribute(DTensor.from_local(values(SHAPE), mesh, [Partial("max")]), ragged)
    with pytest.raises(ValueError, match="placements are needed"):
        tensor.redistribute()
    with pytest.raises(NotImplementedError, match="only within one mesh"):
        tensor.redistribute(init_device_mesh("cpu", (1, 3)), [Replicate(), Replicate()])
    stock = DTensor.from_local(values(SHAPE), mesh, [Replicate()])
    with pytest.raises(NotImplementedError, match=r"Use shardkit.redistribute"):
        stock.redistribute(mesh, ragged)
    with pytest.raises(RuntimeError, match="RaggedShard"):
        torch.distributed.tensor.distribute_tensor(values(SHAPE), mesh, ragged)
    two_axes = init_device_mesh("cpu", (3, 1))
    with pytest.raises(NotImplementedError, match="only one mesh axis can be ragged"):
        distribute_tensor(values(SHAPE), two_axes, [RaggedShard((0,), (1, 5, 0)), RaggedShard((0,), (6,))])
    with pytest.raises(NotImplementedError, match="Reduce a Partial"):
        RaggedTensor.from_local(tensor.to_local(), two_axes, [*ragged, Partial()], shape=SHAPE)
    with pytest.raises(ValueError, match=r"For a DTensor use shardkit.redistribute"):
        distribute_tensor(stock, mesh, ragged)


def test_what_cannot_be_is_refused_on_every_rank_and_stock_code_fails_by_name():
    run_ranks(_refusals, 3)
