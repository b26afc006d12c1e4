"""Run the kernels that interposer selects inside vLLM."""
