"""Optional packages of kernels, and whether they can be used."""
