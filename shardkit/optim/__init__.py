"""Optimizers that never cut a matrix or a block: exact at any world size and layout, moving what a boundary
cuts.
"""

from shardkit.optim.convert import from_sum_form, from_torch_muon
from shardkit.optim.optimizers import SOAP, AdamW, AdamW8bit, Muon, Shampoo
from shardkit.optim.qk_clip import Projection, qk_clip_
from shardkit.optim.routing import route_params, split_params
from shardkit.optim.torchao_state import convert_torchao_state
from shardkit.optim.wish import block_for, muon_plan, ragged_layouts, shampoo_plan

__all__ = [
    "SOAP",
    "AdamW",
    "AdamW8bit",
    "Muon",
    "Projection",
    "Shampoo",
    "block_for",
    "convert_torchao_state",
    "from_sum_form",
    "from_torch_muon",
    "muon_plan",
    "qk_clip_",
    "ragged_layouts",
    "route_params",
    "shampoo_plan",
    "split_params",
]
