"""Attention, products and sums over GPUs by FlashInfer."""
