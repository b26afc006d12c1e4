"""Random numbers for cases, and bounds of what passes through their sums."""

from __future__ import annotations

import torch


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, deviation: float = 1.0
) -> torch.Tensor:
    """Return normally distributed numbers around 0."""
    return (deviation * torch.randn(shape, generator=generator)).to(dtype)


def uniform(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    low: float = -1.0,
    high: float = 1.0,
) -> torch.Tensor:
    """Return numbers between ``low`` and ``high``, so that the bounds of sums are known."""
    return (low + (high - low) * torch.rand(shape, generator=generator)).to(dtype)


def peak(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value, 0 where there is none."""
    finite = tensor.double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if tensor.numel() else 0.0


def longest_row(matrix: torch.Tensor) -> float:
    """Return a bound of the Euclidean lengths of the rows of ``matrix``, 0 of no rows.

    The product of two of them bounds every sum of absolute terms in a product of two matrices,
    and costs far less than that product.
    """
    lengths = torch.linalg.vector_norm(matrix.float(), dim=-1)
    return 1.001 * peak(lengths)  # the lengths themselves are rounded
