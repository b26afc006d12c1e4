"""Checks of one kernel, backend, layer or scheme against the reference."""
