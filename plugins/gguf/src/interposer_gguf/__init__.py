"""Models in GGUF files: what llama.cpp and its relatives write."""
