"""Reader for models in GGUF files, the format of llama.cpp."""
