"""GPUs of AMD as a platform: what they can do, products of 8-bit floats, and kernels of AITER."""
