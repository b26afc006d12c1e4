"""Lora."""
