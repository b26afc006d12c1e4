"""bitsandbytes checkpoints: 4-bit weights with a codebook (NF4, FP4), and LLM.int8() weights."""
