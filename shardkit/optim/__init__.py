"""Optimizers that never cut a matrix: exact at any world size and layout, moving what a boundary cuts."""

from shardkit.optim.optimizers import AdamW, Muon
from shardkit.optim.wish import block_for, muon_plan, ragged_layouts

__all__ = ["AdamW", "Muon", "block_for", "muon_plan", "ragged_layouts"]
