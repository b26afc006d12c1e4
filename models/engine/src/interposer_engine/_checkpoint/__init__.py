"""Checkpoints: reading files, placing tensors in layers, and updating loaded weights."""
