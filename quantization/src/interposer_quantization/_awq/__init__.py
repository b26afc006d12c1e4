"""AWQ checkpoints."""
