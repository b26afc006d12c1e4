"""Kernels of the Hugging Face hub."""
