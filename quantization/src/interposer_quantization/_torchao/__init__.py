"""Checkpoints of torchao."""
