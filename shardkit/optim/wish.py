"""What to ask of `fully_shard` before the optimizer exists, and layouts for ranks that do not exist.

Pure. The layout is fixed when a model is sharded, so an optimizer's wish has to be a function of shapes and
settings. A wish that the planner does not grant changes what travels, never the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import get_args

from shardkit.boxes import Layout
from shardkit.optim.algorithm import PieceAlgorithm
from shardkit.optim.block_algorithm import BlockAlgorithm
from shardkit.optim.blocks import Dealer
from shardkit.optim.muon import MuonAlgorithm
from shardkit.optim.pieces import num_stack_dims
from shardkit.optim.placed import planned
from shardkit.optim.planning import Placing, StepPlan
from shardkit.optim.replicas import Replicas
from shardkit.optim.routing import AlgorithmName
from shardkit.optim.settings import check_settings
from shardkit.optim.shampoo import ShampooRule
from shardkit.optim.teams import Member, make_teams
from shardkit.placement import Blocks, RaggedShard, block_numel
from shardkit.plan import TensorSpec, plan_bucket


def block_for(
    shape: Sequence[int],
    algorithm: AlgorithmName,
    *,
    heads: int | None = None,
    block: int = 1024,
) -> Blocks:
    """The wish that spares `algorithm` its exchange for a parameter of `shape`.

        fully_shard(layer, mesh, shard_placement_fn=lambda p: block_for(p.shape, "muon"))

    Args:
        shape: of the parameter.
        algorithm: "muon" wants whole matrices, or the rows of one head where `heads` says how many there
            are; "shampoo" and "soap" whole bands of `block` rows; "adamw8bit" whole rows; "adamw" nothing.
        heads: as in Muon's groups.
        block: as Shampoo's and SOAP's.

    Returns:
        A preferred wish: the planner takes less where it would pad too much.

    Raises:
        ValueError: an unknown algorithm, heads that do not divide the rows, or a block below 1.
    """
    if algorithm not in get_args(AlgorithmName):
        raise ValueError(f"block_for: expected one of {get_args(AlgorithmName)}, got {algorithm!r}.")
    if len(shape) < 2 or algorithm == "adamw":
        return Blocks.elements()
    num_rows = shape[num_stack_dims(shape)]
    if algorithm == "adamw8bit":
        return Blocks(1, required=False)
    if algorithm in ("shampoo", "soap"):
        return Blocks(min(block, max(1, num_rows)), required=False)
    if heads is not None:
        if heads < 1 or num_rows % heads:
            raise ValueError(f"block_for: heads={heads} do not divide {num_rows} rows of {tuple(shape)}.")
        return Blocks(num_rows // heads, required=False)
    return Blocks(max(1, num_rows), required=False)


def ragged_layouts(
    units: Sequence[Mapping[str, Sequence[int]]], num_ranks: int, blocks: Blocks | None = None
) -> dict[str, Layout]:
    """Where the planner would put the parameters of a model on `num_ranks` ranks of one shard axis.

    Args:
        units: the parameters of each `fully_shard` call: shapes by fqn.
        num_ranks: need not exist.
        blocks: of every matrix; whole rows by default.
    """
    wish = Blocks() if blocks is None else blocks
    layouts: dict[str, Layout] = {}
    for unit in units:
        specs = []
        for name, shape in unit.items():
            numel, period = block_numel(wish, shape)
            row_numel = math.prod(shape[num_stack_dims(shape) + 1 :]) if numel > 1 else 1
            specs.append(TensorSpec(name, math.prod(shape), numel, period, row_numel, wish.required))
        plan = plan_bucket(specs, num_ranks)
        blocks_numel = plan.blocks
        for name, shape in unit.items():
            placement = RaggedShard.from_numels(shape, plan.local_numels(name), blocks_numel[name])
            layouts[name] = Layout(tuple(shape), (num_ranks,), (placement,))
    return layouts


def muon_plan(
    layouts: Mapping[str, Layout],
    *,
    placement: Placing = "auto",
    replicas: Replicas = "auto",
    **settings: object,
) -> StepPlan:
    """The plan of a Muon step for ranks that need not exist, from layouts on one mesh of any shape.

    Args:
        layouts: by fqn, matrices only; all cut by the same ranks.
        placement, replicas, settings: as `Muon` takes them.

    Raises:
        ValueError: the parameters are cut by different sets of ranks.
    """
    return _plan(MuonAlgorithm(), layouts, placement, replicas, settings)


def shampoo_plan(
    layouts: Mapping[str, Layout], *, placement: Placing = "auto", **settings: object
) -> StepPlan:
    """The plan of a Shampoo step for ranks that need not exist, as `muon_plan`.

    Args:
        layouts: by fqn, matrices only; all cut by the same ranks.
        placement, settings: as `Shampoo` takes them.
    """
    return _plan(BlockAlgorithm(ShampooRule()), layouts, placement, "redundant", settings)


def _plan(
    algorithm: PieceAlgorithm,
    layouts: Mapping[str, Layout],
    placement: Placing,
    replicas: Replicas,
    settings: Mapping[str, object],
) -> StepPlan:
    if unknown := settings.keys() - algorithm.defaults.keys():
        raise ValueError(f"settings: expected some of {sorted(algorithm.defaults)}, got {sorted(unknown)}.")
    group, dealer = {**algorithm.defaults, **settings}, Dealer()
    check_settings(group, algorithm)
    members = []
    for name, layout in layouts.items():
        at = planned(name, layout)
        members.append(Member(at, group, algorithm, tuple(algorithm.pieces(at, group, dealer))))
    teams = make_teams(members, placement, replicas)
    if len(teams) != 1:
        raise ValueError(
            f"layouts: expected parameters that one set of ranks cuts, got {len(teams)} such sets. Plan them "
            "one by one."
        )
    return teams[0].plan
