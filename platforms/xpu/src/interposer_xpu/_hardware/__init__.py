"""Detection of Intel GPUs and their properties, without initialising a device."""
