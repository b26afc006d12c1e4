"""Standard quantization schemes: how checkpoints store quantized weights, and the ops that apply them."""
