"""Composable per-parameter sharding for PyTorch.

from shardkit import fully_shard

for block in model.blocks:
    fully_shard(block, mesh)
fully_shard(model, mesh)
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit._torch import (
    AllGather,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ReduceScatter,
    ShardPlacementResult,
)
from shardkit.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardkit.clip import clip_grad_norm_
from shardkit.init import allocate_, broadcast_replicas_, materialize_
from shardkit.mesh import DataParallelMeshDims, build_mesh
from shardkit.module import FSDPModule, UnshardHandle
from shardkit.placement import Blocks, RaggedShard
from shardkit.ragged import RaggedTensor, distribute_tensor, redistribute
from shardkit.report import model_plan, predicted_peak_bytes
from shardkit.wrap import wrap_policy

__all__ = [
    "AllGather",
    "Blocks",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RaggedShard",
    "RaggedTensor",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "allocate_",
    "broadcast_replicas_",
    "build_mesh",
    "clip_grad_norm_",
    "distribute_tensor",
    "fully_shard",
    "materialize_",
    "model_plan",
    "predicted_peak_bytes",
    "redistribute",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "wrap_policy",
]
