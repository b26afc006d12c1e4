"""A plain attention backend."""
