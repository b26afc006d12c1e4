"""Kernels of a distribution as a repository of Hugging Face's hub of kernels."""
