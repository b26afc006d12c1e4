"""Kernels of the compiled library."""
