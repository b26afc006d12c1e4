"""Constrained decoding: compile grammars, and mask the tokens that a grammar forbids."""
