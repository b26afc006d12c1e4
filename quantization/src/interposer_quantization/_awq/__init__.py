"""Checkpoints of AWQ."""
