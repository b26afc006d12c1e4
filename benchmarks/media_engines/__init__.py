"""Adapters of the engines that ``media.py`` compares, one module per library.

The modules run in the engines' environments: they import the standard library, numpy and their own
library only.
"""
