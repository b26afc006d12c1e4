"""Checkpoints of ModelOpt."""
