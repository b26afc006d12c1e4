"""Quantized weights that only a reference multiplies here, dequantized once while loading."""
