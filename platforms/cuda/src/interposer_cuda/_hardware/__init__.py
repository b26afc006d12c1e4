"""Detection of NVIDIA GPUs and their properties, without initialising a device."""
