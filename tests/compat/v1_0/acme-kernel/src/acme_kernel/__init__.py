"""Kernels for standard ops."""
