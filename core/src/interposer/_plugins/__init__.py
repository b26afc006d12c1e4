"""The installed plugins: found, trusted, and their records as candidates."""
