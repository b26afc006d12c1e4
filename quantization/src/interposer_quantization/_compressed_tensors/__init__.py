"""Checkpoints of the compressed-tensors library."""
