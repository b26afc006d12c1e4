"""Cases to compare kernels with their references on, one module per family of ops."""
