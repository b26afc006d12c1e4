"""Quantization of checkpoints: rounding, calibration, and writing the copy."""
