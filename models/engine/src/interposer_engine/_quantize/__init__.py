"""Quantize."""
