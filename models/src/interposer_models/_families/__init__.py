"""The model families, each in a module of its own."""
