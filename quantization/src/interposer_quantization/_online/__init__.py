"""Online quantization: plain weights are quantized while they load."""
