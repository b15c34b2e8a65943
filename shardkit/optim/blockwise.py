"""Matrices as codes and a scale a block: what 8-bit and 4-bit optimizers keep of a moment.

Pure maths on local rows, nothing is communicated. A block is `block` elements of one row, the last of a row
may be short, and none goes on in the next row (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2022, section 2.1, with blocks that end where rows do). So any cut between rows leaves all
blocks whole, and the codes of a row depend on that row alone:

    moment (2, 600), block 256      codes (2, 600)      scales (2, 3): of columns 0..255, 256..511, 512..599

With tiles one scale serves a square of rows and columns. A second moment then spans so many decades that a
linear scale would flush its small entries to zero; its square root is stored instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardkit.optim.codes import Bits, CodeMap, code_map, decode, encode, pack_nibbles, unpack_nibbles

Format = Literal["dynamic", "e4m3"]

LEAST_SCALE = 1e-12  # of a block of zeros


class Quantized(NamedTuple):
    """A matrix of (rows, cols) as stored."""

    codes: Tensor  # uint8, (rows, cols), or (rows, ceil(cols / 2)) with 4 bits
    scales: Tensor  # float32, (rows of scales, ceil(cols / block))


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a moment is stored.

    Args:
        block: columns that share a scale.
        bits: of a code, 8 or 4.
        format: "dynamic" for the table of `codes.py`, "e4m3" for float8 numbers.
        signed: False for a second moment.
        square_root: store the root of a moment that is not negative.
    """

    block: int = 256
    bits: Bits = 8
    format: Format = "dynamic"
    signed: bool = True
    square_root: bool = False

    def num_scales(self, num_cols: int) -> int:
        """Scales in a row of `num_cols` columns."""
        return math.ceil(num_cols / self.block)

    def num_code_bytes(self, num_cols: int) -> int:
        """Bytes of codes in a row of `num_cols` columns."""
        return math.ceil(num_cols * self.bits / 8)

    def quantize(self, moment: Tensor, scale_of_row: Tensor | None = None) -> Quantized:
        """Store a matrix.

        Args:
            moment: (rows, cols) float32, contiguous.
            scale_of_row: (rows,) int64, ascending from zero: which row of scales a row uses. None gives each
                its own.
        """
        rows, cols = moment.shape
        root = moment.sqrt() if self.square_root else moment
        blocks = pad(root, (0, -cols % self.block)).view(rows, self.num_scales(cols), self.block)
        scales = blocks.abs().amax(-1)  # (rows, num_scales)
        if scale_of_row is not None:
            num_rows = int(scale_of_row[-1]) + 1 if rows else 0
            index = scale_of_row[:, None].expand_as(scales)
            scales = scales.new_zeros(num_rows, scales.shape[1]).scatter_reduce_(0, index, scales, "amax")
        scales = scales.clamp_(min=LEAST_SCALE)
        if self.format == "e4m3":
            scales = scales / torch.finfo(torch.float8_e4m3fn).max
        spread = scales if scale_of_row is None else scales.index_select(0, scale_of_row)
        codes = self._encode((blocks / spread.unsqueeze(-1)).flatten(1))[:, :cols]
        return Quantized(pack_nibbles(codes) if self.bits == 4 else codes, scales)

    def dequantize(self, stored: Quantized, num_cols: int, scale_of_row: Tensor | None = None) -> Tensor:
        """The matrix (rows, num_cols) again, float32 and contiguous."""
        codes, scales = stored
        rows = codes.shape[0]
        codes = unpack_nibbles(codes, num_cols) if self.bits == 4 else codes
        spread = scales if scale_of_row is None else scales.index_select(0, scale_of_row)
        values = pad(self._decode(codes), (0, -num_cols % self.block))
        blocks = values.view(rows, self.num_scales(num_cols), self.block)
        moment = (blocks * spread.unsqueeze(-1)).flatten(1)[:, :num_cols].contiguous()
        return moment.square_() if self.square_root else moment

    def _encode(self, numbers: Tensor) -> Tensor:
        if self.format == "e4m3":
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        return encode(numbers, self._map(numbers.device))

    def _decode(self, codes: Tensor) -> Tensor:
        if self.format == "e4m3":
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        return decode(codes, self._map(codes.device))

    def _map(self, device: torch.device) -> CodeMap:
        return code_map(self.signed, self.bits, device)
