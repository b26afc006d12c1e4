"""Benchmarks of a loaded model, and the ceilings that they are compared with."""
