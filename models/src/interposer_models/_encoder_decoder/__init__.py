"""Models whose decoder attends to an encoder's output."""
