"""Random values for test cases, and bounds of sums of such values."""

from __future__ import annotations

import torch


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, deviation: float = 1.0
) -> torch.Tensor:
    """Draw normally distributed numbers with mean 0."""
    return (deviation * torch.randn(shape, generator=generator)).to(dtype)


def uniform(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    low: float = -1.0,
    high: float = 1.0,
) -> torch.Tensor:
    """Draw numbers between ``low`` and ``high``, so that every sum has a known bound."""
    return (low + (high - low) * torch.rand(shape, generator=generator)).to(dtype)


def peak(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor; 0 without finite values."""
    finite = tensor.double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if tensor.numel() else 0.0


def longest_row(matrix: torch.Tensor) -> float:
    """Return an upper bound of the Euclidean lengths of the rows of ``matrix``; 0 without rows.

    In a matmul of two matrices, every sum of absolute terms is at most the product of the longest
    rows (Cauchy-Schwarz). This bound is much cheaper than the matmul of absolute values.
    """
    lengths = torch.linalg.vector_norm(matrix.float(), dim=-1)
    return 1.001 * peak(lengths)  # the lengths are rounded too
