"""Bounds of what passes through a sum, for the tolerances of cases."""

from __future__ import annotations

import torch

__all__ = ["longest_row", "peak"]


def peak(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, 0 of no elements."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def longest_row(matrix: torch.Tensor) -> float:
    """Return a bound of the Euclidean lengths of the rows of ``matrix``, 0 of no rows.

    The product of two of them bounds every sum of absolute terms in a product of two matrices,
    and costs far less than that product.
    """
    lengths = torch.linalg.vector_norm(matrix, dim=-1, dtype=torch.float32)
    return 1.001 * peak(lengths)  # the lengths themselves are rounded
