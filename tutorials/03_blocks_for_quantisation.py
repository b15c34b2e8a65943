"""Keep blocks whole, so that every rank can quantise its part of a matrix by itself.

    python tutorials/03_blocks_for_quantisation.py

Tiles of 32 x 32 share one scale, the greatest magnitude in them. It starts three ranks and prints

    -- Shard(0): the ranks' rows end inside a tile
    rank 0: rows 0 to 53 of 160
    rank 1: rows 54 to 107 of 160
    rank 2: rows 108 to 159 of 160
    4 of the 5 rows of tiles are not those of the whole matrix
    -- Blocks(32): they end between tiles
    rank 0: rows 0 to 127 of 160
    rank 1: rows 128 to 159 of 160
    rank 2: nothing
    0 of the 5 rows of tiles are not those of the whole matrix
    each rank quantised its part without a collective
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from support.progress import say
from support.ranks import run_on_ranks, say_each
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shardkit import Blocks, fully_shard

TILE = 32


class Quantised(NamedTuple):
    """A matrix as 8-bit integers with one scale a tile."""

    codes: Tensor  # (rows, cols), int8
    scales: Tensor  # (row_tiles, col_tiles), float32


def quantise(matrix: Tensor) -> Quantised:
    """Quantise tile by tile; the last row of tiles may be short."""
    num_rows = matrix.shape[0]
    padded = F.pad(matrix, (0, 0, 0, -num_rows % TILE))
    tiles = rearrange(padded, "(i r) (j c) -> i j r c", r=TILE, c=TILE)
    scales = tiles.abs().amax((-2, -1)) / 127
    codes = (tiles / scales[..., None, None]).round().to(torch.int8)
    return Quantised(rearrange(codes, "i j r c -> (i r) (j c)")[:num_rows], scales)


def build_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 160, bias=False), nn.Tanh(), nn.Linear(160, 64, bias=False))


def local_quantised(weight: DTensor) -> Quantised:
    """This rank's rows, quantised by this rank alone."""
    with CommDebugMode() as collectives:
        quantised = quantise(weight.detach().to_local())
    assert collectives.get_total_counts() == 0
    return quantised


def gathered_codes(quantised: Quantised) -> Tensor:
    """The codes of all ranks, one below the other."""
    parts: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, quantised.codes)
    return torch.cat(parts)


def num_wrong_tile_rows(codes: Tensor, expected: Tensor) -> int:
    """In how many rows of tiles some code differs."""
    return int((codes != expected).view(-1, TILE * codes.shape[1]).any(1).sum())


def say_rows(weight: DTensor) -> None:
    """Every rank tells which rows it has."""
    num_rows: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(num_rows, weight.to_local().shape[0])
    start = sum(num_rows[: dist.get_rank()])
    end = start + num_rows[dist.get_rank()]
    say_each(f"rows {start} to {end - 1} of {weight.shape[0]}" if end > start else "nothing")


def main() -> None:
    model = build_model()
    expected = quantise(model[0].weight.detach()).codes

    results = []
    for title, wish in (
        ("-- Shard(0): the ranks' rows end inside a tile", None),
        ("-- Blocks(32): they end between tiles", Blocks(TILE)),
    ):
        say(title)
        sharded = build_model()
        sharded.load_state_dict(model.state_dict())
        fully_shard(sharded, shard_placement_fn=lambda param, wish=wish: wish)
        say_rows(sharded[0].weight)
        codes = gathered_codes(local_quantised(sharded[0].weight))
        results.append(num_wrong_tile_rows(codes, expected))
        say(f"{results[-1]} of the {len(codes) // TILE} rows of tiles are not those of the whole matrix")

    say("each rank quantised its part without a collective")
    assert results[0] > 0
    assert results[1] == 0


if __name__ == "__main__":
    run_on_ranks(main, world_size=3)
