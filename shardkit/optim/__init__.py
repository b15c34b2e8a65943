"""Optimizers that never cut a matrix: exact at any world size and layout, moving only what a boundary cuts."""

from shardkit.optim.optimizers import AdamW, Muon

__all__ = ["AdamW", "Muon"]
