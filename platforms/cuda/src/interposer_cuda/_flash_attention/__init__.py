"""Attention by the packages flash-attn."""
