"""What the cases of all quantized linears share. I input features, O output features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer import Case, Dims
from interposer_testing.cases import longest_row, normal, peak

WITH_OUT_DTYPE = 2
"""Roundings to ``out_dtype``: of the result, and of what is expected, which is rounded to it as
well. The bias is added before, where the scales are applied."""


def linear_case(
    arguments: Mapping[str, Any],
    dims: Dims,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scalings: int,
    beside: float = 0.0,
    *,
    stored_product: bool = False,
) -> Case:
    """Return the case of x weight^T + bias.

    Args:
        x: ``[..., I]`` float64, dequantized.
        weight: ``[O, I]`` float64, dequantized.
        scalings: float32 multiplications of each term or of their sum, whose roundings count as
            additions do.
        beside: bound of sums that a kernel may add and subtract again.
        stored_product: whether the product may be rounded before the bias is added to it.
    """
    terms = peak(x.abs() @ weight.abs().T) + beside
    return Case(
        "",
        arguments,
        dims,
        reduction=weight.shape[1] + scalings + 1,
        magnitude=terms + (0.0 if bias is None else peak(bias)),
        rounded=peak(x @ weight.T) if stored_product and bias is not None else 0.0,
    )


def sampled_case(
    arguments: Mapping[str, Any],
    dims: Dims,
    x: torch.Tensor,
    weight: torch.Tensor,
    scalings: int,
    beside: float = 0.0,
) -> Case:
    """Return the case of a sample without bias, whose bounds come from the lengths of rows.

    Args:
        x: ``[T, I]``, dequantized.
        weight: ``[O, I]``, dequantized.
        beside: as of ``linear_case``.
    """
    return Case(
        f"{x.shape[0]} tokens",
        arguments,
        dims,
        reduction=weight.shape[1] + scalings,
        magnitude=longest_row(x) * longest_row(weight) + beside,
    )


def bias_of(
    out_features: int, dtype: torch.dtype, generator: torch.Generator, present: bool = True
) -> torch.Tensor | None:
    """Return a bias, or None where it is not ``present``."""
    return normal((out_features,), dtype, generator) if present else None


def float8(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    deviation: float = 1.0,
) -> torch.Tensor:
    """Return normally distributed numbers of an 8-bit float."""
    return normal(shape, torch.float32, generator, deviation).to(dtype)
