"""float32 to bfloat16, up or down by chance, so that small updates are not lost in the mean.

The chance is a function of (seed, step, place of the element in the global tensor) and of nothing else: any
number of ranks, replicas included, round alike. Pure; nothing is communicated.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The constants of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014,
# figure 15), as the signed integers that torch has.
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
WORD = 1 << 64


def round_stochastically(numbers: Tensor, place: Tensor, seed: int, step: int) -> Tensor:
    """bfloat16 neighbours of float32 numbers, the nearer the likelier: right in the mean.

    Args:
        numbers: float32.
        place: int64 of the same shape, the row-major index of each in its global tensor.
        seed: of the run.
        step: of the optimizer.
    """
    chance = random_bits(place, seed, step).bitwise_and(0xFFFF).int()
    bits = numbers.contiguous().view(torch.int32)
    rounded = (bits + chance).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(numbers.isfinite(), rounded, numbers).bfloat16()


def random_bits(place: Tensor, seed: int, step: int) -> Tensor:
    """64 bits, int64, for each place, seed and step; equal arguments give equal bits on every device."""
    key = torch.tensor([_signed(seed), step], dtype=torch.int64)
    seeded = int(_mixed(_mixed(key[:1] + GOLDEN) ^ (key[1:] * GOLDEN)))  # a copy would wait for the device
    return _mixed(place * GOLDEN + seeded)


def _mixed(word: Tensor) -> Tensor:
    """splitmix64's finaliser; multiplication wraps around and shifts bring in zeros."""
    word = (word ^ _shifted(word, 30)) * FIRST
    word = (word ^ _shifted(word, 27)) * SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, num_bits: int) -> Tensor:
    return word.bitwise_right_shift(num_bits).bitwise_and((1 << (64 - num_bits)) - 1)


def _signed(number: int) -> int:
    return (number + WORD // 2) % WORD - WORD // 2
