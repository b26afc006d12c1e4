"""Kernels from the Hugging Face Hub."""
