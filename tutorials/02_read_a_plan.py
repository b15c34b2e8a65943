"""Read a plan, and change it: where every parameter of a unit lies, what that wastes, and how to waste less.

    python tutorials/02_read_a_plan.py

A plan is made from sizes and a number of ranks alone, so it can be read before there is a model, a process
group or a GPU. This one is of a transformer layer on four ranks; of four plans it prints

    -- every row stays whole
    4 tensors of 38,976 elements on 4 ranks: shards of 9,792, padding 0.49 %
    order: definition; bound on any order: 9,792, gap 0.00 %; unit 16, alignment 16
      rank 0      bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
      rank 1      bbbbbbbbbbbbbbbbbcccccccccccccccccccccccccccdddddddddddddddddddd
      rank 2      dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd
      rank 3      ddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd.
      a norm.weight: 64
      b qkv.weight: 12,288 in blocks of 64
    ...
    -- 64 rows stay whole
    'up.weight': expected blocks that add at most 10.00 % to the shards of 4 ranks, got 26.11 %.
    Blocks of 4,096 elements make shards of 12,288; cut anywhere they would be 9,744. Do one of:
      - smaller blocks: 1/2 adds 5.09 %
      - required=False: the planner then takes the largest divisor that fits, and says so
      - a larger unit: 2 like this in one add 5.09 %
    ...
    fully_shard holds what the plan says
"""

from __future__ import annotations

import math

import torch.distributed as dist
from support.ranks import run_on_ranks
from torch import nn

from shardkit import Blocks, fully_shard
from shardkit.errors import PaddingError
from shardkit.placement import block_numel
from shardkit.plan import BucketPlan, TensorSpec, plan_bucket

NUM_RANKS = 4


class Layer(nn.Module):
    """A norm and three matrices of a transformer layer of width 64; it is never run here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.qkv = nn.Linear(64, 192, bias=False)
        self.out = nn.Linear(64, 64, bias=False)
        self.up = nn.Linear(64, 352, bias=False)

    def forward(self) -> None: ...


def plan(blocks: Blocks) -> BucketPlan:
    """The plan of the layer with the same wish for all of its parameters."""
    tensors = []
    for name, param in Layer().named_parameters():
        size = block_numel(blocks, param.shape).block_numel  # elements that must stay together
        row_numel = param.shape[1] if param.ndim == 2 else 1
        spec = TensorSpec(name, math.prod(param.shape), size, row_numel=row_numel, required=blocks.required)
        tensors.append(spec)
    return plan_bucket(tensors, NUM_RANKS, unit_numel=16, align_numel=16, max_padding=0.10)


def main() -> None:
    # One line a rank, one letter a parameter, a dot for padding. Shards are equal; where one ends inside a
    # parameter, a row ends. No order of these parameters has a shard below the bound: a gap of 0 is a proof.
    print("-- every row stays whole")
    rows = plan(Blocks())
    print(rows)

    # Larger blocks have fewer places to be cut at. The planner moves parameters to find some.
    print("-- 32 rows stay whole, for tiles of 32 x 32")
    tiles = plan(Blocks(32))
    print(tiles)
    assert all(tiles.blocks[name] == 32 * 64 for name in tiles.blocks if name != "norm.weight")

    # At some size they no longer fit, and the planner says so before anything runs: whose blocks are to
    # blame, and the ways out, each of them tried.
    print("-- 64 rows stay whole")
    try:
        plan(Blocks(64))
        raise AssertionError("expected a PaddingError")
    except PaddingError as error:
        print(error)

    # One of them is to prefer blocks rather than to require them.
    print("-- 64 rows, preferably")
    preferred = plan(Blocks(64, required=False))
    print(preferred)
    assert preferred.padding <= 0.10
    assert preferred.notes

    # fully_shard makes the same plan, and every rank holds what it says.
    run_on_ranks(check_fully_shard, NUM_RANKS)
    print("fully_shard holds what the plan says")


def check_fully_shard() -> None:
    """The sizes of this rank's shards are those of the plan."""
    layer = Layer()
    fully_shard(layer, shard_placement_fn=lambda param: Blocks(32))
    tiles = plan(Blocks(32))
    for name, param in layer.named_parameters():
        assert param.to_local().numel() == tiles.local_range(name, dist.get_rank()).numel


if __name__ == "__main__":
    main()
