"""Checkpoints of GPTQ."""
