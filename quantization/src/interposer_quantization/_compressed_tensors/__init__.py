"""Checkpoints of compressed-tensors."""
