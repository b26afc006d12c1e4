"""Tiny random models of every architecture that the installed transformers knows."""
