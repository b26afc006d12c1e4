"""Sums over GPUs that read each other's memory, by torch's symmetric memory."""
