"""Checkpoints of AutoRound."""
