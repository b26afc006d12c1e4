"""A board that computes on the CPU."""
