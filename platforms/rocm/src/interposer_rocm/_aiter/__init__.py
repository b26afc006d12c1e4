"""Kernels of AITER."""
