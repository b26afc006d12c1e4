"""The nouns: platforms, ops, layers, backends, schemes, and requests with their answers."""
