"""Quantization of checkpoints: rounding, calibration, and writing of the quantized copy."""
