"""Packed weights: files that hold weights in the form of this machine's kernels."""
