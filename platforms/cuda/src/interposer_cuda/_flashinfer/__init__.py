"""Attention and products by FlashInfer."""
