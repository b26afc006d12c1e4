"""Models that run on several ranks: starting, coordinating and comparing the processes."""
