"""Checkpoints of bitsandbytes: weights of 4 bits by a codebook, and of 8 bits."""
