"""The plan of a whole optimizer: one team for every set of ranks that cut parameters together.

A model may have parameters on several sets of ranks, those of FSDP alone and those of FSDP and TP. Each set
has a plan and an engine of its own; its members compare their plans once, before the first message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit._torch import backend_name, new_group_of
from shardkit.agreement import check_agreement
from shardkit.boxes import Box
from shardkit.collectives import all_reduce_now, has_peers
from shardkit.optim.algorithm import Group, PieceAlgorithm, Target
from shardkit.optim.engine import Engine, Ranks, route_of
from shardkit.optim.loading import plain_settings
from shardkit.optim.pieces import Piece
from shardkit.optim.placed import Placed
from shardkit.optim.planning import Placing, StepPlan, plan_step
from shardkit.optim.replicas import (
    Copies,
    Cost,
    Replicas,
    block_sizes,
    copies_of,
    cost_of,
    in_block,
    note_of,
    shared_piece,
)


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter that an optimizer steps: where it lies, its group, and who works on its pieces."""

    at: Placed
    group: Group
    worker: PieceAlgorithm | None  # None where it is stepped element by element
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What an optimizer does in a step on every set of ranks that this rank is in; `print` shows tables."""

    steps: tuple[StepPlan, ...]
    elementwise: tuple[str, ...]  # parameters of which nothing travels

    def __str__(self) -> str:
        tables = [str(step) for step in self.steps]
        if count := len(self.elementwise):
            parameters, where = ("parameter", "it lies") if count == 1 else ("parameters", "they lie")
            tables.append(f"{count} {parameters} elementwise, where {where}: nothing travels")
        return "\n\n".join(tables)


class Team:
    """The members on one set of ranks, with their plan.

    Args:
        members: all with pieces, on the same ranks, in the optimizer's order.
        placing: how their pieces may be placed.
    """

    def __init__(self, members: Sequence[Member], placing: Placing) -> None:
        self.members = tuple(members)
        self.places: list[tuple[PieceAlgorithm, Member, Piece]] = [
            (member.worker, member, piece)
            for member in members
            if member.worker is not None
            for piece in member.pieces
        ]
        self.ranks = members[0].at.ranks
        pieces = [piece for _, _, piece in self.places]
        self.plan = plan_step(pieces, len(self.ranks), [placing] * len(pieces))
        self._engine: Engine | None = None

    def prepare(self, bucket_bytes: int, missing_grads: str) -> None:
        """Make the engine, once. Collective over the team then: all ranks must call.

        Raises:
            PlanMismatchError: on all ranks, if they planned differently; it names the first parameter.
        """
        if self._engine is None:
            self._engine = self._made_engine(bucket_bytes, missing_grads)

    def run(self, targets: Mapping[str, Target]) -> None:
        """Step all pieces of `targets`, by parameter. Collective over the team: all ranks must call."""
        assert self._engine is not None
        active = [place for place, (_, m, _) in enumerate(self.places) if m.at.name in targets]
        self._engine.run(_TeamWork(self.places, targets), active)

    def _made_engine(self, bucket_bytes: int, missing_grads: str) -> Engine:
        at = self.members[0].at
        device = at.device
        rank = dist.get_rank() if dist.is_initialized() else 0
        index = self.ranks.index(rank)
        if len(self.ranks) == 1:
            return Engine(self.plan, Ranks(index, (0,), None), device, bucket_bytes)
        groups = {id(member.group): member.group for member in self.members}.values()
        settings = f"buckets of {bucket_bytes} bytes, missing gradients {missing_grads!r}"
        group = self._opened_group(at, [*self.plan.lines, *map(_settings_of, groups), settings])
        order = dist.get_process_group_ranks(group)
        group_ranks = tuple(order.index(global_rank) for global_rank in self.ranks)
        route = route_of(self.plan, group, backend_name(group, device))
        return Engine(self.plan, Ranks(index, group_ranks, route), device, bucket_bytes)

    def _opened_group(self, at: Placed, lines: Sequence[str]) -> dist.ProcessGroup:
        """The group over which messages pass, of one axis or of exactly the ranks of several.

        Plans and settings, `lines`, are compared first. Then each rank gives one number: the first messages
        of a group on NCCL must be met by all its ranks, and a step's may not concern all.
        """
        label, world = "optimizer step", dist.group.WORLD
        assert world is not None
        own = at.groups[0] if len(at.groups) == 1 else None
        if not has_peers(at.groups[0], at.device):
            return own or world
        for axis_group in at.groups:
            check_agreement(lines, axis_group, label)
        own = own or new_group_of(self.ranks, at.device)
        if own is None:
            return world
        all_reduce_now(torch.zeros(1, device=at.device), own, f"{label}, first message")
        return own


def _settings_of(group: Group) -> str:
    """What ranks must agree on beside the plan; the rate may be a tensor, and schedulers keep theirs here."""
    apart = ("params", "param_names", "reasons", "lr", "initial_lr")
    settings = {
        key: _value_of(value) for key, value in sorted(plain_settings(group).items()) if key not in apart
    }
    return f"settings {settings}"


def _value_of(value: object) -> object:
    """A setting without what ranks may spell or hold in other ways: a list of any kind is its numbers."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Sequence):
        return tuple(map(_value_of, value))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return int(number) if number.is_integer() else number
    return value


def agree(members: Iterable[Member], have_grad: Mapping[str, bool]) -> dict[str, bool]:
    """Which members have a gradient on any rank that holds a part, those stepped element by element too.

    Collective over each set of such ranks: all must call, with the same members.
    """
    by_ranks: dict[tuple[int, ...], list[Placed]] = {}
    for member in members:
        at = member.at.over_replicas()
        by_ranks.setdefault(at.ranks, []).append(at)
    agreed: dict[str, bool] = {}
    for held in by_ranks.values():
        device = held[0].device
        own = [have_grad[at.name] for at in held]
        flags = torch.tensor(own, dtype=torch.int32, device=device)
        for group in held[0].groups:
            all_reduce_now(flags, group, "optimizer step, asking which gradients are missing")
        agreed |= {at.name: bool(flag) for at, flag in zip(held, flags.tolist(), strict=True)}
    return agreed


def make_teams(members: Sequence[Member], placing: Placing, replicas: Replicas = "auto") -> tuple[Team, ...]:
    """One team for every set of ranks with pieces, in order of first occurrence.

    Args:
        members: in the optimizer's order.
        placing: how pieces may be placed.
        replicas: whether ranks that hold copies share the work on them.
    """
    with_copies: dict[tuple[int, ...], list[Member]] = {}
    for member in members:
        if member.pieces:
            with_copies.setdefault(member.at.over_replicas().ranks, []).append(member)
    return tuple(
        team for of_ranks in with_copies.values() for team in _teams_among(of_ranks, placing, replicas)
    )


def _teams_among(members: Sequence[Member], placing: Placing, replicas: Replicas) -> list[Team]:
    """The teams of members on one set of ranks, copies included: one for each replica, or one of several."""
    by_ranks: dict[tuple[int, ...], list[Member]] = {}
    for member in members:
        by_ranks.setdefault(member.at.ranks, []).append(member)
    apart = [Team(of_ranks, placing) for of_ranks in by_ranks.values()]
    homed = [member.at.name for member in members if any(piece.home for piece in member.pieces)]
    if replicas == "shared" and homed:
        raise ValueError(
            f"param {homed[0]!r}: replicas='shared' holds for no parameter whose blocks have state, as each "
            "replica has that on its own ranks. Use replicas='auto'."
        )
    if replicas == "redundant" or placing == "local" or homed:
        return apart
    wide = [member.at.over_replicas() for member in members]
    copies = [
        copies_of(member.at.layout.mesh_shape, member.at.axes, at.axes)
        for member, at in zip(members, wide, strict=True)
    ]
    best: tuple[Team, Cost] | None = None
    for size in block_sizes(set(copies)):
        team = Team([_shared(*each, size) for each in zip(members, wide, copies, strict=True)], placing)
        cost = cost_of([team.plan])
        if best is not None and cost.total >= best[1].total:
            break  # the more share, the fewer operations and the more bytes a rank
        best = team, cost
    if best is None:
        return apart
    (shared, cost), redundant = best, cost_of([team.plan for team in apart])
    is_shared = replicas == "shared" or cost.total < redundant.total
    note = note_of(len(shared.ranks) if is_shared else None, cost, redundant)
    for team in (teams := [shared] if is_shared else apart):
        team.plan = replace(team.plan, note=note)
    return teams


def _shared(member: Member, wide: Placed, copies: Copies, size: int) -> Member:
    """The member as `size` neighbouring ranks hold it, this one among them."""
    if wide is member.at:
        return member
    index = 0
    for axis in wide.axes:
        index = index * wide.layout.mesh_shape[axis] + wide.me[axis]
    start = index - index % size
    at, own = replace(wide, ranks=wide.ranks[start : start + size]), in_block(copies, size)
    return replace(member, at=at, pieces=tuple(shared_piece(piece, own) for piece in member.pieces))


@dataclass(frozen=True, slots=True)
class _TeamWork:
    """Sends each piece to its parameter's algorithm."""

    places: Sequence[tuple[PieceAlgorithm, Member, Piece]]
    targets: Mapping[str, Target]

    def read(self, place: int, field: int, box: Box) -> Tensor:
        worker, member, piece = self.places[place]
        return worker.read(self.targets[member.at.name], piece, field, box)

    def compute(self, places: Sequence[int], fields: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        by_worker: dict[PieceAlgorithm, list[int]] = {}
        for i, place in enumerate(places):
            by_worker.setdefault(self.places[place][0], []).append(i)
        results: dict[int, list[Tensor]] = {}
        for worker, chosen in by_worker.items():
            done = worker.compute(
                [self.targets[self.places[places[i]][1].at.name] for i in chosen],
                [self.places[places[i]][2] for i in chosen],
                [fields[i] for i in chosen],
            )
            results.update(zip(chosen, done, strict=True))
        return [results[i] for i in range(len(places))]

    def write(self, place: int, field: int, box: Box, values: Tensor) -> None:
        worker, member, piece = self.places[place]
        worker.write(self.targets[member.at.name], piece, field, box, values)
