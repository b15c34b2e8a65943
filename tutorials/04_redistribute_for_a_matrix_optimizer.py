"""Redistribute for an optimizer that needs whole matrices, as Muon does: only what is cut moves.

    python tutorials/04_redistribute_for_a_matrix_optimizer.py

Muon steps along the orthogonal matrix nearest to a gradient, which no rank can find from a part of it. So
each matrix goes to the rank that holds most of it, is orthogonalised there, and its rows go back to where
they belong. Matrices that lie on one rank already cost nothing. On two ranks it prints

    a.weight (64, 64), rows [64, 0]: rank 0 has it
    b.weight (96, 64), rows [64, 32]: rank 0 gets 32
    c.weight (64, 96), rows [0, 64]: rank 1 has it
    moved 2,048 of 16,384 elements, and back
    the parameters are those of one process, to the bit
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.progress import say
from support.ranks import run_on_ranks
from torch import Tensor, nn

from shardkit import Blocks, RaggedShard, RaggedTensor, fully_shard, redistribute

LR = 0.1


class Model(nn.Module):
    """Three matrices, of which one is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)
        self.b = nn.Linear(64, 96, bias=False)
        self.c = nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def loss(model: nn.Module, rank: int) -> Tensor:
    """Each rank has a batch of its own."""
    return model(torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))).square().mean()


def orthogonalised(matrix: Tensor) -> Tensor:
    """Newton and Schulz's iteration for U V^T of `matrix` = U S V^T (Jordan et al., 2024, Muon)."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T  # (rows, rows)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def owner_of(placement: RaggedShard) -> int:
    """The rank that holds most rows: what the others hold has to move."""
    return max(range(len(placement.local_units)), key=lambda rank: placement.local_units[rank])


def whole_on(rank: int, placement: RaggedShard) -> RaggedShard:
    """All rows on one rank."""
    num_rows = sum(placement.local_units)
    return RaggedShard((0,), tuple(num_rows if r == rank else 0 for r in range(len(placement.local_units))))


def muon_step(param: RaggedTensor) -> int:
    """Step along the orthogonalised gradient; returns the elements that had to move to one rank.

    Collective over the parameter's mesh: all ranks must call.
    """
    (placement,) = param.placements
    owner = owner_of(placement)
    whole = redistribute(param.grad, [whole_on(owner, placement)])  # to its owner
    if dist.get_rank() == owner:
        whole.to_local().copy_(orthogonalised(whole.to_local()))
    update = redistribute(whole, param.placements)  # and back
    param.add_(update, alpha=-LR)
    return param.numel() - placement.local_units[owner] * param.shape[1]


def main() -> None:
    sharded, plain = Model(), Model()
    plain.load_state_dict(sharded.state_dict())
    fully_shard(sharded, shard_placement_fn=lambda param: Blocks())

    loss(sharded, dist.get_rank()).backward()
    num_moved = 0
    with torch.no_grad():
        for name, param in sharded.named_parameters():
            moved = muon_step(param)
            rows, owner = param.placements[0].local_units, owner_of(param.placements[0])
            told = f"gets {moved // param.shape[1]}" if moved else "has it"
            say(f"{name} {tuple(param.shape)}, rows {list(rows)}: rank {owner} {told}")
            num_moved += moved
    total = sum(param.numel() for param in plain.parameters())
    say(f"moved {num_moved:,} of {total:,} elements, and back")

    for rank in range(dist.get_world_size()):  # the same on one process
        (loss(plain, rank) / dist.get_world_size()).backward()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        expected = param.detach().add(orthogonalised(param.grad), alpha=-LR)
        assert torch.equal(sharded.get_parameter(name).full_tensor(), expected)
    say("the parameters are those of one process, to the bit")


if __name__ == "__main__":
    run_on_ranks(main, world_size=2)
