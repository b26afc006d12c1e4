"""Offload: weights that lie in host memory or on the disk, and come when their block computes."""
