"""AutoRound checkpoints."""
