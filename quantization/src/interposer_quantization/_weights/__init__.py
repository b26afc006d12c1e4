"""Linear layers by how their weights are packed."""
