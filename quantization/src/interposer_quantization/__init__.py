"""Standard quantization schemes: what checkpoints store, and the ops that apply it."""
