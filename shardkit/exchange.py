"""Moving a tensor from one layout to another: which elements go from whom to whom, then the messages.

Level 6 of the data flow, below `ragged.py`. First a pure plan: each rank's boxes in the layout it has are
intersected with the boxes that every rank wants, so what travels is exactly what the two layouts make
necessary, and a rank that neither gives nor takes is not involved. Then the messages, at most one a pair of
ranks, straight from and into the local tensors where the elements are contiguous there. Rows (2, 2, 0)
becoming (0, 1, 3):

    has     rank 0: a b    rank 1: c d    rank 2:              0 -> 1: a    0 -> 2: b    1 -> 2: c d
    wants   rank 0:        rank 1: a      rank 2: b c d

On an axis with a pending reduction every rank has a summand of each element; who wants the element gets all
of them and adds in rank order: a reduce-scatter. Where the wanted layout replicates such an axis, its ranks
first reduce what the other axes leave them and then all-reduce that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardkit import _torch
from shardkit.boxes import Box, Layout, local_boxes, local_part, local_shape
from shardkit.collectives import all_reduce_now
from shardkit.mesh import device_of
from shardkit.placement import RaggedShard, contiguous_stride
from shardkit.specs import coordinate_of

Coordinate = tuple[int, ...]


class Message(NamedTuple):
    """What goes to or comes from one peer: boxes of the local tensor, in an order both sides agree on."""

    peer: Coordinate
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        """Elements in the message."""
        return sum(math.prod(box.size) for box in self.boxes)

    def run(self) -> tuple[int, int] | None:
        """(offset, numel) if the boxes follow one another without a gap in the local tensor."""
        start = end = self.boxes[0].local_offset
        for box in self.boxes:
            tight = contiguous_stride(box.size)
            rigid = all(
                size == 1 or a == b for size, a, b in zip(box.size, box.local_stride, tight, strict=True)
            )
            if box.local_offset != end or not rigid:
                return None
            end += math.prod(box.size)
        return start, end - start


class Exchange(NamedTuple):
    """All messages of one rank; the one whose peer is the rank itself is a local copy."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@lru_cache(maxsize=4096)
def plan_exchange(source: Layout, target: Layout, me: Coordinate) -> Exchange:
    """What the rank at `me` sends and receives when a tensor goes from `source` to `target`; pure."""
    ranges = [
        [at] if _stays_on(source, target, axis) else range(size)
        for axis, (at, size) in enumerate(zip(me, source.mesh_shape, strict=True))
    ]
    wanted, held = local_boxes(target, me), local_boxes(source, me)
    sends, receives = [], []
    for peer in product(*ranges):
        given = [h.intersect(w) for w in local_boxes(target, peer) for h in held]
        taken = [w.intersect(h) for w in wanted for h in local_boxes(source, peer)]
        sends.append(Message(peer, tuple(box for box in given if box is not None)))
        receives.append(Message(peer, tuple(box for box in taken if box is not None)))
    return Exchange(tuple(m for m in sends if m.boxes), tuple(m for m in receives if m.boxes))


def _stays_on(source: Layout, target: Layout, axis: int) -> bool:
    """Whether elements only move between ranks that agree on `axis`: replicas serve themselves."""
    has, wants = source.placements[axis], target.placements[axis]
    return isinstance(has, Replicate) or (isinstance(has, Partial) and isinstance(wants, Replicate))


@dataclass(slots=True)
class Transfer:
    """A transfer under way; the tensor it reads must not change before `wait` returns."""

    works: list[dist.Work]
    finish: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        """The local tensor in the new layout."""
        for work in self.works:
            work.wait()
        return self.finish()


def transfer(local: torch.Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> Transfer:
    """Start moving `local`, held in `source`, to `target`.

    Collective over `mesh`: all ranks must call.
    """
    me = coordinate_of(mesh)
    partial_axes = _partial_axes(source)
    reduces = any(not _stays_on(source, target, axis) for axis in partial_axes)
    whole_source, whole_target = with_all_units(source, mesh), with_all_units(target, mesh)
    if whole_source == whole_target:
        return Transfer([], lambda: local)
    exchange = plan_exchange(whole_source, whole_target, me)
    local, new_local = local.contiguous(), local.new_empty(local_shape(target, me))
    if reduces:
        new_local.zero_()
    sends = [(message.peer, _packed(message, local)) for message in exchange.sends if message.peer != me]
    receives, unpacks = [], []
    for message in exchange.receives:
        run = message.run()
        if message.peer == me:
            own = next(m for m in exchange.sends if m.peer == me)
            unpacks.append((message, _packed(own, local)))
        elif run is not None and not reduces:
            receives.append((message.peer, new_local.view(-1).narrow(0, *run)))
        else:
            scratch = local.new_empty(message.numel)
            receives.append((message.peer, scratch))
            unpacks.append((message, scratch))

    def finish() -> torch.Tensor:
        for message, flat in unpacks:
            _unpack(message, flat, new_local, add=reduces)
        return _finish_partial(new_local, source, target, mesh)

    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and not _stays_on(source, target, axis)]
    return Transfer(_start(sends, receives, mesh, me, axes), finish)


# A compiled graph holds no mesh, only the text that names a route here. Tracing writes it, in every process.
_routes: dict[str, tuple[Layout, Layout, DeviceMesh]] = {}


def traced_transfer(local: torch.Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """The local tensor in the layout `target`, as one operator of the graph that a compiler traces."""
    groups = [mesh.get_group(axis).group_name for axis in range(mesh.ndim)]
    route = f"{source} -> {target} on groups {groups}"
    _routes[route] = source, target, mesh
    moved: torch.Tensor = _transfer_in_graph(local, route)
    return moved


@torch.library.custom_op("shardkit::transfer", mutates_args=())
def _transfer_in_graph(local: torch.Tensor, route: str) -> torch.Tensor:
    moved = transfer(local, *_routes[route]).wait()
    return moved.clone() if moved is local else moved  # an operator may not return what it got


@_transfer_in_graph.register_fake
def _transferred_shape(local: torch.Tensor, route: str) -> torch.Tensor:
    _, target, mesh = _routes[route]
    return local.new_empty(local_shape(target, coordinate_of(mesh)))


_torch.keep_in_order(_transfer_in_graph)  # messages carry no name: all ranks have to send them in one order


def scatter(
    full: torch.Tensor, layout: Layout, mesh: DeviceMesh, root: Coordinate, device: torch.device
) -> torch.Tensor:
    """This rank's local tensor of `full`, whose values are those of the rank at `root`.

    Collective over `mesh`: all ranks must call. Each rank receives its own part and no more.
    """
    me, layout = coordinate_of(mesh), with_all_units(layout, mesh)
    sends: list[tuple[Coordinate, torch.Tensor]] = []
    receives: list[tuple[Coordinate, torch.Tensor]] = []
    if me == root:
        full = full.to(device).contiguous()
        local = local_part(full, layout, me)
        for peer in product(*map(range, layout.mesh_shape)):
            boxes = tuple(box.within(layout.shape) for box in local_boxes(layout, peer))
            if boxes and peer != me:
                sends.append((peer, _packed(Message(peer, boxes), full)))
    else:
        local = torch.empty(local_shape(layout, me), dtype=full.dtype, device=device)
        receives = [(root, local)] if local.numel() else []
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    for work in _start(sends, receives, mesh, me, axes):
        work.wait()
    return local


def with_all_units(layout: Layout, mesh: DeviceMesh) -> Layout:
    """The layout with the units of every tensor-parallel coordinate.

    Each coordinate plans its own parts, so they differ where TP divides this or another parameter of the
    bucket unevenly. Collective over the axes beside the ragged one where one of them cuts the tensor.

    Raises:
        ValueError: on all ranks, if some coordinates cut along other dims than others.
    """
    axis = layout.ragged_axis
    if axis is None:
        return layout
    ragged = layout.placements[axis]
    assert isinstance(ragged, RaggedShard)
    if not any(isinstance(placement, Shard) for placement in layout.placements):
        return layout
    me = coordinate_of(mesh)
    cuts = {me[:axis] + me[axis + 1 :]: (ragged.dims, ragged.local_units)}
    for other in range(mesh.ndim):
        if other != axis:
            gathered = [cuts] * mesh.size(other)
            dist.all_gather_object(gathered, cuts, group=mesh.get_group(other))
            cuts = {place: held for part in gathered for place, held in part.items()}
    if len({dims for dims, _ in cuts.values()}) > 1:
        raise ValueError(
            f"a tensor of shape {layout.shape} is cut along other dims on some ranks of a mesh axis that "
            f"shards it too: {cuts}, by coordinate. Give its RaggedShard the same dims on all of them."
        )
    units = {place: held for place, (_, held) in cuts.items()}
    return replace(layout, other_units=tuple(sorted(units.items())))


def _partial_axes(source: Layout) -> list[int]:
    """Axes with a pending sum or mean; other pending reductions are stock DTensor's to finish."""
    axes = [axis for axis, placement in enumerate(source.placements) if isinstance(placement, Partial)]
    for axis in axes:
        placement = source.placements[axis]
        if type(placement) is not Partial or placement.reduce_op not in ("sum", "avg"):
            raise NotImplementedError(
                f"redistribute from {placement}: only sums and means are reduced into a ragged layout. "
                "Reduce it first: tensor.redistribute(placements=[Replicate()])."
            )
    return axes


def _finish_partial(local: torch.Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """All-reduce the axes that stay pending through the exchange, and turn sums into means."""
    for axis in _partial_axes(source):
        if _stays_on(source, target, axis):
            local = _torch.all_reduce(local, "sum", mesh, axis)
        placement = source.placements[axis]
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            local = local / source.mesh_shape[axis]
    return local


def _packed(message: Message, local: torch.Tensor) -> torch.Tensor:
    """The message's elements as one flat tensor, a view of `local` where they lie so."""
    run = message.run()
    if run is not None:
        return local.view(-1).narrow(0, *run)
    return torch.cat([box.view(local).reshape(-1) for box in message.boxes])


def _unpack(message: Message, flat: torch.Tensor, local: torch.Tensor, add: bool) -> None:
    """Write or add a message's elements to `local`."""
    start = 0
    for box in message.boxes:
        numel = math.prod(box.size)
        part, view = flat[start : start + numel].view(box.size), box.view(local)
        _ = view.add_(part) if add else view.copy_(part)
        start += numel


Parts = Sequence[tuple[Coordinate, torch.Tensor]]


def _start(
    sends: Parts, receives: Parts, mesh: DeviceMesh, me: Coordinate, axes: Sequence[int]
) -> list[dist.Work]:
    """Post all messages, each over the group of the axis it stays on, or over one of the whole mesh.

    Groups come in one order on all ranks: NCCL connects two ranks by their first messages, and the host waits
    for both.

    Args:
        axes: along which any two ranks may exchange something; the same on all ranks.
    """
    by_group: dict[int, list[dist.P2POp]] = {axis: [] for axis in (*axes, mesh.ndim)}
    groups = _opened_groups(mesh, axes)
    for op, parts in ((dist.isend, sends), (dist.irecv, receives)):
        for peer, tensor in parts:
            differing = [axis for axis, (a, b) in enumerate(zip(me, peer, strict=True)) if a != b]
            axis = differing[0] if len(differing) == 1 else mesh.ndim
            by_group[axis].append(dist.P2POp(op, tensor, int(mesh.mesh[peer]), groups[axis]))
    return [work for ops in by_group.values() if ops for work in dist.batch_isend_irecv(ops)]


_opened: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_Made = dict[tuple[int, ...], dist.ProcessGroup]
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, _Made] = weakref.WeakKeyDictionary()  # of a default group


def _opened_groups(mesh: DeviceMesh, axes: Sequence[int]) -> dict[int, dist.ProcessGroup]:
    """The groups of these axes and, for several, one of all ranks, at `mesh.ndim`.

    On NCCL the first messages of a group must be met by all its ranks, and ours may not concern all: a
    collective comes before them. Collective over `mesh` then. A group that was bound to its device is open.
    """
    device = device_of(mesh)
    groups = {axis: mesh.get_group(axis) for axis in axes}
    if len(axes) > 1:
        groups[mesh.ndim] = _group_of(mesh, device)
    for group in groups.values():
        if group in _opened or group.bound_device_id is not None:
            continue
        if _torch.backend_name(group, device) == "nccl":
            all_reduce_now(torch.zeros(1, device=device), group, "redistribute, first message")
            _opened.add(group)
    return groups


def _group_of(mesh: DeviceMesh, device: torch.device) -> dist.ProcessGroup:
    """One of all the mesh's ranks: the default group, but on NCCL not where that has more.

    Known by its ranks, not by the mesh: ranks may drop and remake that at different times.
    """
    world = dist.group.WORLD
    assert world is not None
    if mesh.size() == world.size() or _torch.backend_name(world, device) != "nccl":
        return world
    made, ranks = _made.setdefault(world, {}), tuple(mesh.mesh.flatten().tolist())
    if ranks not in made and (group := _torch.new_group_of(ranks, device)) is not None:
        made[ranks] = group
    return made.get(ranks, world)
