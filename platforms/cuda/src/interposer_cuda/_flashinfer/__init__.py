"""Attention, GEMM and all-reduce through FlashInfer."""
