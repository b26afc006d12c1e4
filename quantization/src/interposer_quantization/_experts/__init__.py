"""Routed experts: parts shared by several checkpoint formats."""
