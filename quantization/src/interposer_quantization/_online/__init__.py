"""Quantization of plain weights while they load."""
