"""Writing a quantized copy of a model directory."""
