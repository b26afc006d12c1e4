"""Explanations: every choice, the reason, and the reasons of all refusals."""
