"""Comparison of a plugin with other versions of its host, by reading source code."""
