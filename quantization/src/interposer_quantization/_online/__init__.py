"""Online quantization: plain weights are quantized during loading."""
