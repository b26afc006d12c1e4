"""Mixture of experts: router, experts, dispatch of tokens, and experts over several ranks."""
