"""Shard a linear layer and see what a rank holds.

    python tutorials/01_shard_a_linear.py

It starts two ranks and prints

    -- Shard(0): every rank has its chunk of every parameter
    rank 0: weight DTensor (5, 8), bias DTensor (5,)
    rank 1: weight DTensor (5, 8), bias DTensor (5,)
    -- Blocks(): the parameters lie end to end, and the ranks cut what that gives in two
    rank 0: weight RaggedTensor (6, 8), bias RaggedTensor (0,)
    rank 1: weight RaggedTensor (4, 8), bias RaggedTensor (10,)
    -- unsharded: the whole layer, in one buffer that the ranks' shards make
    rank 0: weight Parameter (10, 8) at byte 0, bias Parameter (10,) at byte 320
    rank 1: weight Parameter (10, 8) at byte 0, bias Parameter (10,) at byte 320
    -- after backward: gradients lie as the parameters do
    rank 0: weight RaggedTensor (6, 8), bias RaggedTensor (0,)
    rank 1: weight RaggedTensor (4, 8), bias RaggedTensor (10,)
    they are the mean of the ranks' own gradients
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.progress import say
from support.ranks import run_on_ranks, say_each
from torch import Tensor, nn

from shardkit import Blocks, fully_shard


def held(linear: nn.Linear, *, of_grads: bool = False) -> str:
    """The kind and the local shape of what this rank has of a sharded layer."""
    parts = []
    for name, param in linear.named_parameters():
        tensor = param.grad if of_grads else param
        parts.append(f"{name} {type(tensor).__name__} {tuple(tensor.to_local().shape)}")
    return ", ".join(parts)


def gathered(linear: nn.Linear) -> str:
    """The kind and the shape of an unsharded layer's parameters, and where they lie in their storage."""
    return ", ".join(
        f"{name} {type(param).__name__} {tuple(param.shape)} at byte "
        f"{param.data_ptr() - param.untyped_storage().data_ptr()}"
        for name, param in linear.named_parameters()
    )


def loss(linear: nn.Module, rank: int) -> Tensor:
    """Each rank has a batch of its own."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    return linear(x).square().mean()


def main() -> None:
    plain = nn.Linear(8, 10)  # weight (10, 8), bias (10,)

    say("-- Shard(0): every rank has its chunk of every parameter")
    chunked = nn.Linear(8, 10)
    fully_shard(chunked)  # in place; without a mesh it is sharded over all ranks
    say_each(held(chunked))

    # A gather brings each rank's chunks next to one another, so every parameter has to be copied out of it.
    # Blocks() lays the parameters end to end instead and cuts that into two equal shards, where a row ends:
    #
    #    rank 0   | w0 w1 w2 w3 w4 w5 |        48 elements
    #    rank 1   | w6 w7 w8 w9 b  .  |        32 + 10, and 6 of padding
    #
    # What a gather brings then *is* the parameters: nothing is copied.
    say("-- Blocks(): the parameters lie end to end, and the ranks cut what that gives in two")
    linear = nn.Linear(8, 10)
    linear.load_state_dict(plain.state_dict())
    fully_shard(linear, shard_placement_fn=lambda param: Blocks())
    say_each(held(linear))

    say("-- unsharded: the whole layer, in one buffer that the ranks' shards make")
    linear.unshard()  # forward and backward do this by themselves
    say_each(gathered(linear))
    linear.reshard()

    say("-- after backward: gradients lie as the parameters do")
    loss(linear, dist.get_rank()).backward()
    say_each(held(linear, of_grads=True))

    for rank in range(dist.get_world_size()):  # on one process: add up the ranks' gradients
        loss(plain, rank).backward()
    for sharded, param in zip(linear.parameters(), plain.parameters(), strict=True):
        assert torch.equal(sharded.grad.full_tensor(), param.grad / dist.get_world_size())
    say("they are the mean of the ranks' own gradients")


if __name__ == "__main__":
    run_on_ranks(main, world_size=2)
