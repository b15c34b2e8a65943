"""Weights that travel in eight bits: quantised by blocks before a gather, restored after it.

A sibling above the data flow. Optimizers keep the shards as they are, in float32 say; only what is sent is
rounded, to a fourth of its bytes (ZeRO++, Wang et al., 2023, section 4.1: qwZ). Every block has a scale of
its own (Dettmers et al., 2022, section 2.1), so a rank needs whole blocks, which a ragged layout gives it:
nothing is communicated to quantise, and what is gathered is to the bit what one process makes of the matrix.

    w (384, 256) in blocks of 128 x 128, Blocks(128) over 2 ranks         codes (256, 256)  scales (2, 2)
                                                                          codes (128, 256)  scales (1, 2)

    for layer in model.layers:
        fully_shard(layer, mesh, shard_placement_fn=lambda p: Blocks(128) if p.ndim > 1 else None)
    fully_shard(model, mesh)
    gather_quantized(model, BlockQuantizer((128, 128), torch.float8_e4m3fn))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardkit._torch import local_of
from shardkit.placement import RaggedShard


@dataclass(frozen=True, slots=True)
class BlockQuantizer:
    """Rounds every block of a matrix to codes of 8 bits and a float32 scale; those at the edge may be short.

    Args:
        block: rows and columns of a block: (128, 128) tiles, or (1, 32) groups along a row.
        dtype: of the codes, int8 or a float8.
    """

    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if min(self.block) < 1 or self.dtype.itemsize != 1 or not self.dtype.is_signed:
            raise ValueError(
                f"{self}: expected a block of at least one row and column, and codes of int8 or a float8."
            )

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The codes (rows, cols) and the scales (row blocks, column blocks), float32, of a matrix.

        The largest magnitude of a block becomes the largest code; a block of zeros has scale one.
        """
        largest_code = self._largest_code
        rows, cols = self.block
        padded = nn.functional.pad(matrix.float(), (0, -matrix.shape[1] % cols, 0, -matrix.shape[0] % rows))
        blocks = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))  # (row blocks, rows, ...)
        largest = blocks.abs().amax((1, 3))
        scales = torch.where(largest > 0, largest / largest_code, 1.0)
        codes = matrix.float() / self._spread(scales, matrix.shape)
        if not self.dtype.is_floating_point:
            codes = codes.round()
        return codes.clamp(-largest_code, largest_code).to(self.dtype), scales

    def dequantize(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrix (rows, cols) again, multiplied in float32 and cast to `dtype`."""
        return (codes.float() * self._spread(scales, codes.shape)).to(dtype)

    @property
    def _largest_code(self) -> float:
        is_float = self.dtype.is_floating_point
        return float(torch.finfo(self.dtype).max if is_float else torch.iinfo(self.dtype).max)

    def _spread(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """The scale of every element."""
        rows, cols = self.block
        spread = scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(cols, 1)
        return spread[:, : shape[1]]


def gather_quantized(
    module: nn.Module,
    quantizer: BlockQuantizer | None = None,
    *,
    params: Iterable[nn.Parameter] | None = None,
) -> list[str]:
    """Let sharded matrices travel quantised, from the next gather on.

    Sets `fsdp_pre_all_gather` and `fsdp_post_all_gather` on local tensors. What replaces those, `.to`,
    `to_empty` or `load_state_dict(assign=True)`, comes without: call it again. Gradients pass through the
    rounding, and are reduced as before.

    Args:
        module: on or above which `fully_shard` has been called, and which is not gathered.
        quantizer: the blocks and the dtype of the codes; by default 128 x 128 tiles in float8_e4m3fn.
        params: which of the module's parameters; by default all sharded ones with two dims or more. Of more
            dims, the last is the columns and the others are rows.
    Returns:
        The names of the parameters that travel quantised.
    Raises:
        ValueError: a block of a parameter lies on two ranks.
        NotImplementedError: a parameter is cut by tensor parallelism too.
    """
    quantizer = quantizer or BlockQuantizer()
    chosen = None if params is None else {id(param) for param in params}
    extended = {
        name: param
        for name, param in module.named_parameters()
        if isinstance(param, DTensor)
        and (param.ndim > 1 and param.is_floating_point() if chosen is None else id(param) in chosen)
    }
    for name, param in extended.items():
        _check_whole_blocks(name, param, quantizer.block[0])
    for param in extended.values():
        _extend(local_of(param), quantizer)
    return list(extended)


def _extend(local: Tensor, quantizer: BlockQuantizer) -> None:
    def pre(mesh: DeviceMesh) -> tuple[tuple[Tensor, Tensor], None]:
        return quantizer.quantize(local.flatten(0, -2)), None

    def post(
        outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        codes, scales = outputs
        matrix = quantizer.dequantize(codes, scales, param_dtype)
        if out is None:
            return matrix, (matrix,)
        out.copy_(matrix.view(out.shape))
        return None

    extended: Any = local
    extended.fsdp_pre_all_gather, extended.fsdp_post_all_gather = pre, post


def _check_whole_blocks(name: str, param: DTensor, block_rows: int) -> None:
    """Every rank's rows begin and end at the edge of a block."""
    cut = [placement for placement in param.placements if not isinstance(placement, Replicate)]
    if len(cut) > 1:
        raise NotImplementedError(
            f"param {name!r}: it is placed {param.placements}, and only one mesh axis may cut a matrix that "
            "travels quantised. Leave it out of `params`."
        )
    shape = tuple(param.shape)
    num_rows = math.prod(shape[:-1])
    edges = _row_edges(cut[0], shape, param.device_mesh.size(param.placements.index(cut[0]))) if cut else []
    stacked = len(shape) > 2 and shape[-2] % block_rows
    if edges is None or stacked or any(edge % block_rows and edge != num_rows for edge in edges):
        raise ValueError(
            f"param {name!r}: shape {shape} placed {param.placements} has blocks of {block_rows} rows on two "
            f"ranks, or in two matrices of a stack. Shard it with Blocks({block_rows}); the matrices of a "
            "stack need a whole number of blocks."
        )


def _row_edges(placement: Placement, shape: tuple[int, ...], num_ranks: int) -> list[int] | None:
    """Where every rank's rows end; None where a rank has parts of rows, or padding."""
    if isinstance(placement, RaggedShard) and len(placement.dims) < len(shape):
        rows_of_unit = math.prod(shape[len(placement.dims) : -1])
        return [units * rows_of_unit for units in accumulate(placement.local_units)]
    if isinstance(placement, Shard) and placement.dim == 0 and shape[0] % num_ranks == 0:
        return [math.prod(shape[:-1]) // num_ranks * rank for rank in range(1, num_ranks + 1)]
    return None
