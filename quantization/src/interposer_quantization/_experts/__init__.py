"""Routed experts by how their weights are stored."""
