"""Composable per-parameter sharding for PyTorch."""
