"""The standard layers, each a ``PluggableLayer`` that binds its ops when it is constructed."""

MOST_LIKELY = 20
"""Largest number of top log probabilities per position, as in the OpenAI API."""
