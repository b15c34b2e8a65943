"""Composable per-parameter sharding for PyTorch.

from shardkit import fully_shard

for block in model.blocks:
    fully_shard(block, mesh)
fully_shard(model, mesh)
"""

from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

from shardkit.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardkit.clip import clip_grad_norm_
from shardkit.mesh import build_mesh
from shardkit.module import FSDPModule, UnshardHandle

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "build_mesh",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
