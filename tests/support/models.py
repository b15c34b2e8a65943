"""Small models, each with one trait that sharding can get wrong, and the batch of each rank.

`CASES` names them: `build()` gives the same weights on every call, `units` the submodules to wrap bottom-up
before the root, `loss(model, rank)` a scalar whose batch differs by rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of odd sizes: no dim divides by 2, 3 or 4, and a layer may have fewer rows than ranks."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a GELU MLP."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-5), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """A tiny language model; `tied` shares the embedding with the head."""

    def __init__(self, *, vocab: int = 31, dim: int = 12, num_layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads=2) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Branchy(nn.Module):
    """Takes the even or the odd branch, so that ranks may use different parameters; none uses `never`."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.trunk, self.even, self.odd, self.never = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.odd(x) if branch % 2 else self.even(x)


class LoRALinear(nn.Module):
    """A frozen matrix and a trained low-rank correction, in one unit."""

    def __init__(self, in_features: int, out_features: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, in_features))
        self.lora_b = nn.Parameter(torch.randn(out_features, rank) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class Experts(nn.Module):
    """A stack of matrices (num_experts, out, in), each row of the batch weighted over the experts."""

    def __init__(self, num_experts: int = 3, dim: int = 5) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.weight = nn.Parameter(torch.randn(num_experts, dim, dim) / 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.einsum("eoi,ni->neo", self.weight, x)
        return (outputs * self.router(x).softmax(-1).unsqueeze(-1)).sum(1)


class ConvNet(nn.Module):
    """Four-dimensional weights, and a buffer that training changes: a running mean of the channels."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 5, 3), nn.GroupNorm(1, 5), nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.mean.lerp_(x.detach().float().mean((0, 2, 3)), 0.1)
        x = x - self.mean.to(x.dtype)[:, None, None]
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


@dataclass(frozen=True, slots=True)
class Case:
    """A model by recipe: how to build it, what to wrap before the root, and each rank's loss."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    unit_names: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """The model with the same weights on every call and rank; the caller's random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make()

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The submodules that become units of their own, innermost first; the root is left to the caller."""
        return [model.get_submodule(name) for name in self.unit_names]

    def sharded(self, fully_shard: Callable[..., object], **kwargs: object) -> nn.Module:
        """A fresh model, every unit and then the root wrapped by `fully_shard(module, **kwargs)`."""
        model = self.build()
        for module in [*self.units(model), model]:
            fully_shard(module, **kwargs)
        return model


def normal_batch(rank: int, *shape: int) -> Tensor:
    """Rank `rank`'s inputs, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank))


def token_batch(rank: int, *shape: int, vocab: int = 31) -> Tensor:
    """Rank `rank`'s token ids, always the same."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(100 + rank))


def square_loss(*shape: int) -> Callable[[nn.Module, int], Tensor]:
    """The mean square of the model's output on inputs of `shape`."""
    return lambda model, rank: model(normal_batch(rank, *shape)).float().square().mean()


def branch_loss(branch_of_rank: Callable[[int], int]) -> Callable[[nn.Module, int], Tensor]:
    """The mean square of the branch that each rank takes."""
    return lambda model, rank: model(normal_batch(rank, 4, 7), branch_of_rank(rank)).float().square().mean()


def next_token_loss(model: nn.Module, rank: int) -> Tensor:
    """The cross-entropy of the next token over two sequences of nine."""
    tokens = token_batch(rank, 2, 9)
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def frozen_embedding() -> nn.Module:
    model = Transformer()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.norm.requires_grad_(False)
    return model


BLOCKS = ("blocks.0", "blocks.1")
CASES: dict[str, Case] = {
    "mlp": Case(lambda: MLP(7, 13, 5, 3), square_loss(4, 7), ("layers.0", "layers.1")),
    "few_rows": Case(lambda: MLP(5, 1, 2, 3), square_loss(4, 5), ("layers.0",)),
    "transformer": Case(Transformer, next_token_loss, BLOCKS),
    "tied": Case(lambda: Transformer(tied=True), next_token_loss, BLOCKS),
    "frozen": Case(frozen_embedding, next_token_loss, BLOCKS),
    "lora": Case(
        lambda: nn.Sequential(LoRALinear(5, 7), nn.Tanh(), LoRALinear(7, 3)), square_loss(4, 5), ("0", "2")
    ),
    "experts": Case(lambda: nn.Sequential(nn.Linear(3, 5), Experts()), square_loss(4, 3), ("1",)),
    "conv": Case(ConvNet, square_loss(2, 1, 6, 6), ("conv",)),
    "same_branch": Case(Branchy, branch_loss(lambda rank: 0), ("even", "odd")),
    "branch_by_rank": Case(Branchy, branch_loss(lambda rank: rank), ("even", "odd")),
}
