"""Explanations: every choice, its reason, and why everything else was refused."""
