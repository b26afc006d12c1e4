"""Models whose decoder attends to what an encoder made of another text."""
