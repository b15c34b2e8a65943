"""Numbers in [-1, 1] as codes of 8 or 4 bits and back, by a table of the values that codes stand for.

Pure and element by element: the first stage of quantised optimizer state, before `blockwise.py` scales blocks
into [-1, 1]. The dynamic map has few steps near one and ever finer ones towards zero, down to 1e-7 with 8
bits, so that small moments keep their sign and size (Dettmers, "8-Bit Approximations for Parallelism in Deep
Learning", 2016, section 2.1). With 4 bits and no sign the values are equally spaced and leave out zero, which
a second moment must not become (Li et al., "Memory Efficient Optimizers with 4-bit States", 2023, section 4):

    unsigned, 4 bits    1/16  2/16  ..  16/16           code 0 is 1/16
    signed, 4 bits      -0.8875 .. -0.00550  0.00550 .. 0.8875 and 0 and 1, sorted
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Bits = Literal[8, 4]

NUM_BUCKETS = 1 << 16  # float32 numbers that share sign, exponent and seven bits of fraction


class CodeMap(NamedTuple):
    """What codes stand for, and the tables that find the nearest one.

    A float32's upper 16 bits name a bucket; `bucket_code` is the code of its lowest number. No bucket holds
    two edges, so one comparison with the next edge gives the code of any number in it.
    """

    values: Tensor  # (2**bits,) float32, ascending
    edges: Tensor  # (2**bits,) float32: the least number whose code is above i; the last is infinite
    bucket_code: Tensor  # (NUM_BUCKETS,) int32


@lru_cache(maxsize=32)
def code_map(signed: bool, bits: Bits, device: torch.device) -> CodeMap:
    """The map on a device, built once.

    Args:
        signed: False for second moments, which are not negative.
        bits: of a code.
        device: where the tables live.
    """
    values = _linear_values() if bits == 4 and not signed else _dynamic_values(signed, bits)
    edges = _edges(values)
    upper = torch.arange(NUM_BUCKETS, dtype=torch.int32) - NUM_BUCKETS // 2
    nearest_zero = upper.bitwise_left_shift(16)
    lowest = torch.where(upper < 0, nearest_zero | 0xFFFF, nearest_zero).view(torch.float32)
    bucket_code = torch.bucketize(lowest.nan_to_num(0.0), edges[:-1], right=True, out_int32=True)
    return CodeMap(values.to(device), edges.to(device), bucket_code.to(device))


def encode(numbers: Tensor, table: CodeMap) -> Tensor:
    """The code, uint8, of the value nearest to each float32 number in [-1, 1]; halfway goes up."""
    bucket = numbers.contiguous().view(-1).view(torch.int32).bitwise_right_shift(16).add_(NUM_BUCKETS // 2)
    codes = table.bucket_code.index_select(0, bucket)
    above = numbers.view(-1) >= table.edges.index_select(0, codes)
    return codes.add_(above).to(torch.uint8).view(numbers.shape)


def decode(codes: Tensor, table: CodeMap) -> Tensor:
    """The float32 values that uint8 codes stand for."""
    return table.values.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes of 4 bits a byte, the first in the upper half: (rows, cols) -> (rows, ceil(cols / 2))."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return even[:, ::2].bitwise_left_shift(4).bitwise_or(even[:, 1::2])


def unpack_nibbles(packed: Tensor, num_cols: int) -> Tensor:
    """The codes of 4 bits again: (rows, ceil(cols / 2)) -> (rows, cols)."""
    both = torch.stack((packed.bitwise_right_shift(4), packed.bitwise_and(0xF)), -1)
    return both.flatten(1)[:, :num_cols]


def _dynamic_values(signed: bool, bits: Bits) -> Tensor:
    """Decades down from one, each with half as many values as the one above; and zero and one."""
    num_decades = bits - 1
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(num_decades):
        num_values = 2**decade if signed else 2 ** (decade + 1)
        borders = torch.linspace(0.1, 1, num_values + 1)
        magnitudes = (borders[:-1] + borders[1:]) / 2.0 * 10 ** (decade + 1 - num_decades)
        values += [magnitudes, -magnitudes] if signed else [magnitudes]
    return torch.cat(values).sort().values


def _linear_values() -> Tensor:
    return torch.linspace(0, 1, 17)[1:]


def _edges(values: Tensor) -> Tensor:
    """The least float32 that is at least halfway to the next value, in float32's own arithmetic."""
    low, half = values[:-1], (values[1:] - values[:-1]) * 0.5
    edges, far = low + half, torch.tensor(2.0)
    for _ in range(8):  # the rounded sum is a few numbers off at most
        before = torch.nextafter(edges, -far)
        edges = torch.where(before - low >= half, before, edges)
    for _ in range(8):
        edges = torch.where(edges - low >= half, edges, torch.nextafter(edges, far))
    return torch.cat((edges, torch.tensor([float("inf")])))
