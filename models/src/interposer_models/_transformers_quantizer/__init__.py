"""Online quantization of models that transformers loads."""
