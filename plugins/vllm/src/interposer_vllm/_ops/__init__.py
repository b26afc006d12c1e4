"""Ops that vLLM registers in torch, as kernels of interposer's ops."""
