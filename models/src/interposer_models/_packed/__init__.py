"""Packed forms of checkpoints: what kernels prepared, in a file that is mapped."""
