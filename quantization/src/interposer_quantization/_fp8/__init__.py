"""Checkpoints of 8-bit floats."""
