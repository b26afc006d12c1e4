"""Attention through FlashAttention 2 and FlashAttention 3."""
