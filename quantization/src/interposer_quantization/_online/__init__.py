"""Online quantization: unquantized checkpoints are quantized during loading."""
