"""Packed weights: files that hold weights in the form that this machine's kernels read."""
