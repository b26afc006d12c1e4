"""FP8 checkpoints: e4m3 weights with scales."""
