"""A model family in a frame of its own, and one that is derived from the common decoder."""
