"""Checkpoints: their files, their tensors, and how weights get to layers."""
