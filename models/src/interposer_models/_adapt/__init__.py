"""Adaptation of foreign module trees: structure proposes a kernel, numbers decide."""
