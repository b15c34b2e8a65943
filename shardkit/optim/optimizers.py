"""The optimizers a user builds: `Muon` and `AdamW`, one class whose groups default to another algorithm.

optimizer = Muon(split_params(model), lr=3e-4)          matrices by Muon, the rest by AdamW, in one object
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardkit.optim.adamw import AdamWAlgorithm
from shardkit.optim.algorithm import Algorithm
from shardkit.optim.muon import MuonAlgorithm, Orthogonalize, Scale
from shardkit.optim.newton_schulz import Coefficients, TableName
from shardkit.optim.optimizer import DEFAULT_BUCKET_BYTES, MissingGrads, Params, ShardedOptimizer
from shardkit.optim.planning import Placing
from shardkit.optim.replicas import Replicas


class Muon(ShardedOptimizer):
    """Muon on parameters in any layout, equal to torch.optim.Muon on whole ones.

    In float32 on CPUs it is equal to the bit, at any world size and layout. `step` is collective over the
    ranks that cut a matrix, and their replicas: all of them must call. Clip gradients before it, as
    `clip_grad_norm_` does.

    Args:
        params: matrices, stacks of experts (experts, rows, cols) and convolutions; tensors, named pairs or
            groups. Groups may set `algorithm="adamw"`, and for Muon `heads`, `split_rows` and `flatten`, see
            `matrices_of`.
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
        params: tensors, named pairs or groups; groups may set `algorithm="muon"`.
        lr, betas, eps, weight_decay, maximize: as torch.optim.AdamW's.
        fused: torch's fused kernel, a little faster and on CPUs not equal to the bit.

    Raises:
        ValueError: a setting out of range.
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
        fused: bool = False,
    ) -> None:
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, algorithm="adamw", algorithms=_algorithms(None), settings=settings)


def _algorithms(orthogonalize: Orthogonalize | None) -> dict[str, Algorithm]:
    return {"muon": MuonAlgorithm(orthogonalize), "adamw": AdamWAlgorithm()}
