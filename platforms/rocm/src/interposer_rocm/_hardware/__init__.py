"""Detection of AMD GPUs and their properties, without initialising a device."""
