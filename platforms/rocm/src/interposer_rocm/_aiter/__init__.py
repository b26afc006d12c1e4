"""Attention, MoE experts and all-reduce through AITER, AMD's kernel library."""
