"""Packed forms of checkpoints: weights that kernels have prepared, in a file to be mapped."""
