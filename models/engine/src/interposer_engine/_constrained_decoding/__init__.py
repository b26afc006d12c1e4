"""Constrained decoding: compiling of grammars, and masking of tokens that a grammar forbids."""
