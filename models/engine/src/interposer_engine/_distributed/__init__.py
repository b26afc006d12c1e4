"""Models on several ranks: start, coordinate and compare the processes."""
