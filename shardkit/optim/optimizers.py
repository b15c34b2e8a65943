"""The optimizers a user builds: one class whose groups default to another algorithm in each.

optimizer = Muon(split_params(model), lr=3e-4)          matrices by Muon, the rest by AdamW, in one object
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shardkit.optim.adamw import AdamWAlgorithm
from shardkit.optim.adamw8bit import AdamW8bitAlgorithm
from shardkit.optim.algorithm import Algorithm
from shardkit.optim.block_algorithm import BlockAlgorithm
from shardkit.optim.blockwise import Format
from shardkit.optim.codes import Bits
from shardkit.optim.muon import MuonAlgorithm, Orthogonalize, Scale
from shardkit.optim.newton_schulz import Coefficients, TableName
from shardkit.optim.optimizer import DEFAULT_BUCKET_BYTES, MissingGrads, Params, ShardedOptimizer
from shardkit.optim.planning import Placing
from shardkit.optim.replicas import Replicas
from shardkit.optim.shampoo import Graft, RootName, ShampooRule
from shardkit.optim.soap import SoapRule


class Muon(ShardedOptimizer):
    """Muon on parameters in any layout, equal to torch.optim.Muon on whole ones.

    In float32 on CPUs it is equal to the bit, at any world size and layout. `step` is collective over the
    ranks that cut a matrix, and their replicas: all of them must call. Clip gradients before it, as
    `clip_grad_norm_` does.

    Args:
        params: matrices, stacks of experts (experts, rows, cols) and convolutions; tensors, named pairs or
            groups. Groups may set another `algorithm`, as "adamw" or "adamw8bit", and for Muon `heads`,
            `split_rows` and `flatten`, see `matrices_of`.
        lr: learning rate; a float or a tensor of one element.
        momentum, nesterov, weight_decay: as torch.optim.Muon's.
        adjust_lr: what an update is multiplied by, named by its formula on (rows, cols): "rms_0.2" is 0.2
            sqrt(max(rows, cols)), torch's "match_rms_adamw", which lets AdamW's lr serve both (Liu et al.,
            2025, "Muon is scalable", section 2.2); "sqrt_ratio_clamped" is sqrt(max(1, rows / cols)), torch's
            "original"; "sqrt_ratio", "sqrt_max"; or a function.
        coefficients: a table of `newton_schulz.TABLES`, or (a, b, c) for each step.
        ns_dtype: of the matrix products.
        eps: the least norm that is divided by; torch's 1e-7 shrinks the update of tiny gradients.
        row_norm_beta2: 0.95 makes it NorMuon.
        orthogonalize: replaces Newton and Schulz: takes and gives (batch, rows, cols).
        comm_dtype: of what travels; None is bfloat16 where Newton and Schulz begin with that cast, else
            `ns_dtype` or float32.
        maximize: step upwards.
        placement: "auto", or the mode of every matrix: "local", "owner", "replicate".
        bucket_bytes: most bytes that a rank sends or receives at once.
        missing_grads, replicas: see `ShardedOptimizer`.

    Raises:
        ValueError: a parameter that is no matrix, or a setting out of range.
        TypeError: a setting of another kind.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr: Scale = "rms_0.2",
        coefficients: TableName | Coefficients = "jordan",
        ns_dtype: torch.dtype = torch.bfloat16,
        eps: float = 1e-30,
        row_norm_beta2: float | None = None,
        orthogonalize: Orthogonalize | None = None,
        comm_dtype: torch.dtype | None = None,
        maximize: bool = False,
        placement: Placing = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        missing_grads: MissingGrads = "symmetric",
        replicas: Replicas = "auto",
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "adjust_lr": adjust_lr,
            "coefficients": coefficients,
            "ns_dtype": ns_dtype,
            "eps": eps,
            "row_norm_beta2": row_norm_beta2,
            "comm_dtype": comm_dtype,
            "maximize": maximize,
        }
        super().__init__(
            params,
            algorithm="muon",
            algorithms=_algorithms(orthogonalize),
            settings=settings,
            placing=placement,
            bucket_bytes=bucket_bytes,
            missing_grads=missing_grads,
            replicas=replicas,
        )


class AdamW(ShardedOptimizer):
    """AdamW on local tensors, equal to torch.optim.AdamW and several times faster on small shards.

    Args:
        params: tensors, named pairs or groups; groups may set another `algorithm`, as "muon".
        lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW's.
        foreach: for calls that pass torch's; tensors are stepped in lists in any case, and torch's two ways
            give the same numbers.
        capturable, differentiable: False; only torch's own can be captured in a CUDA graph or differentiated.
        fused: torch's fused kernel, a little faster and on CPUs not equal to the bit.

    Raises:
        ValueError: a setting out of range.
        TypeError: a setting of another kind.
        NotImplementedError: capturable or differentiable.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if capturable or differentiable:
            raise NotImplementedError(
                "AdamW: capturable=True and differentiable=True are torch.optim.AdamW's alone. Leave them "
                "out, or use that for these parameters."
            )
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, algorithm="adamw", algorithms=_algorithms(None), settings=settings)


class AdamW8bit(ShardedOptimizer):
    """AdamW with moments of about 2 bytes a parameter, 1 with `bits=4`, exact under any sharding by rows.

    Parameters of fewer than two dims or of fewer than `min_numel` elements keep float32 moments; the global
    size decides, never a shard's. No step communicates. Constructed and stepped by every rank.

    State of a parameter, in its layout: `step`; `exp_avg_codes` and `exp_avg_sq_codes`, uint8 of its shape
    (with 4 bits two a byte along a row); `exp_avg_scales` and `exp_avg_sq_scales`, float32, `(rows,
    ceil(cols / block))`. It is saved and loaded by torch's distributed checkpoint, into any number of ranks.

    Args:
        params: parameters, named ones, or groups; any keyword below can be a group's own, and groups may set
            another `algorithm`. Plain tensors, Shard and replicated DTensors, RaggedTensors.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times lr.
        maximize: ascend.
        block: columns of a row that share a scale.
        bits: of a code. 4 is for the dynamic format.
        format: "dynamic", or "e4m3" for float8.
        second_moment: "v" stores it, "sqrt" its root; by default the root with tiles.
        tile: (rows, columns) that share a scale, such as (128, 128), in place of one row of `block` columns.
            Ranks then hold whole tiles: `Blocks(128)`.
        stochastic_rounding: round bfloat16 parameters by chance instead of to the nearest.
        seed: of that chance, beside the step and the element's global index.
        min_numel: elements below which moments stay float32.

    Raises:
        ValueError: a setting is out of range, or a shard cuts a block of a parameter.
        TypeError: a parameter is not real, or a setting is of another kind.
        NotImplementedError: two mesh axes cut the columns of a parameter, or the rows of its tiles.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        block: int = 256,
        bits: Bits = 8,
        format: Format = "dynamic",
        second_moment: Literal["v", "sqrt"] | None = None,
        tile: tuple[int, int] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        min_numel: int = 4096,
    ) -> None:
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "block": block,
            "bits": bits,
            "format": format,
            "second_moment": second_moment,
            "tile": tile,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "min_numel": min_numel,
        }
        super().__init__(params, algorithm="adamw8bit", algorithms=_algorithms(None), settings=settings)


class Shampoo(ShardedOptimizer):
    """Shampoo by blocks on parameters in any layout, the same at any world size and layout.

    In float32 on CPUs it is the same to the bit. Blocks never follow the shards: those that a boundary cuts
    travel, as float32, to the rank that has their state. `step` is collective over the ranks that cut a
    matrix: all of them must call. State takes about 24 bytes a parameter, 32 with QR, and is saved and loaded
    by torch's distributed checkpoint into any number of ranks.

    Args:
        params: tensors, named pairs or groups: matrices, stacks (experts, rows, cols), convolutions; those of
            fewer dims step along the direction that `graft` names. Groups may set another `algorithm`, and
            `flatten` as for Muon.
        lr: learning rate; a float or a tensor of one element.
        betas: of the momentum, and of both sides and the second moment; 1.0 sums in place of a mean.
        eps: added to the diagonal of both sides, in units of its mean; so tiny gradients are no matter.
        weight_decay: decoupled, times lr.
        block: most rows and columns of a block. With tensor parallelism take one that leaves each of its
            ranks a block of every matrix, or some ranks have more to do than others.
        update_every: steps between new roots of a block; each step renews its share of the blocks, by turns
            that follow from the parameter's name.
        start: the first step in which roots are made, `update_every` by default; before it, and until its own
            turn comes, a block steps along the direction that `graft` names.
        graft: whose direction gives a block its norm: "adam", "rmsprop", "sgd" (the momentum), or None, which
            leaves the norm as it is; vectors, and blocks without a root, then step along the momentum.
        graft_eps: added to the root of the second moment.
        root: how the inverse root is found: "eigh", "qr" (one step of QR a time on earlier eigenvectors), or
            "newton" (products alone, with eigenvectors where they do not converge).
        maximize: step upwards.
        placement: "auto", or "local", which refuses blocks that are cut.
        bucket_bytes: most bytes that a rank sends or receives at once.
        missing_grads: see `ShardedOptimizer`.

    Raises:
        ValueError: a setting out of range; with "local", at the first plan() or step(), a block that is cut.
        TypeError: a setting of another kind.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 1e-2,
        *,
        block: int = 1024,
        update_every: int = 50,
        start: int | None = None,
        graft: Graft = "adam",
        graft_eps: float = 1e-8,
        root: RootName = "eigh",
        maximize: bool = False,
        placement: Literal["auto", "local"] = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        missing_grads: MissingGrads = "symmetric",
    ) -> None:
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block": block,
            "update_every": update_every,
            "start": start,
            "graft": graft,
            "graft_eps": graft_eps,
            "root": root,
            "maximize": maximize,
        }
        super().__init__(
            params,
            algorithm="shampoo",
            algorithms=_algorithms(None),
            settings=settings,
            placing=_block_placing(placement),
            bucket_bytes=bucket_bytes,
            missing_grads=missing_grads,
        )


class SOAP(ShardedOptimizer):
    """SOAP by blocks on parameters in any layout, the same at any world size and layout, as `Shampoo` is.

    The first step of a matrix finds eigenvectors and moves nothing. State takes about 24 bytes a parameter
    in whole square blocks, and more in short or narrow ones.

    Args:
        params: as `Shampoo`'s; those of fewer than two dims are stepped as by AdamW.
        lr, betas, eps, weight_decay, maximize: as AdamW's; the second beta is that of both sides too.
        block: most rows and columns of a block.
        update_every: steps between new eigenvectors of a block; each step renews its share of the blocks.
        placement, bucket_bytes, missing_grads: as `Shampoo`'s.

    Raises:
        ValueError: a setting out of range; with "local", at the first plan() or step(), a block that is cut.
        TypeError: a setting of another kind.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block: int = 1024,
        update_every: int = 10,
        maximize: bool = False,
        placement: Literal["auto", "local"] = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        missing_grads: MissingGrads = "symmetric",
    ) -> None:
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block": block,
            "update_every": update_every,
            "maximize": maximize,
        }
        super().__init__(
            params,
            algorithm="soap",
            algorithms=_algorithms(None),
            settings=settings,
            placing=_block_placing(placement),
            bucket_bytes=bucket_bytes,
            missing_grads=missing_grads,
        )


def _block_placing(placement: Placing) -> Placing:
    if placement not in ("auto", "local"):
        raise ValueError(f"placement: expected 'auto' or 'local', got {placement!r}: a block has one owner.")
    return placement


def _algorithms(orthogonalize: Orthogonalize | None) -> dict[str, Algorithm]:
    return {
        "muon": MuonAlgorithm(orthogonalize),
        "adamw": AdamWAlgorithm(),
        "adamw8bit": AdamW8bitAlgorithm(),
        "shampoo": BlockAlgorithm(ShampooRule()),
        "soap": BlockAlgorithm(SoapRule()),
    }
