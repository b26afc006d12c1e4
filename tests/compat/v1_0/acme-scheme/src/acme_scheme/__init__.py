"""A quantization scheme that stores weights in 8 bit steps."""
