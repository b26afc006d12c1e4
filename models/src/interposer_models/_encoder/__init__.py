"""Models that turn texts into vectors or classes."""
