"""The kernels that interposer selects, inside vLLM."""
