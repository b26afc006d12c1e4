"""Ops that vLLM registers in torch, as kernels of ops here."""
