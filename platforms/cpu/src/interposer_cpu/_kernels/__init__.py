"""Kernels of the CPU platform's compiled library, and the Python code that calls these."""
