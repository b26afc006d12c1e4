"""Benchmarks of a loaded model, compared with a roofline."""
