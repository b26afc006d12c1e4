"""Products of 8-bit floats: of few rows by the portable kernel that splits sums, else hipBLASLt.

Compiled, not executed on a GPU. Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch

from interposer_ops import scaled_mm
from interposer_ops.triton import split_linear
from interposer_ops.triton_availability import MOST_SPLIT_ROWS
from interposer_rocm.scaled_products import halved

__all__ = ["fp8_linear", "fp8_linear_of_halves"]


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``fp8_linear``."""
    few = x.numel() <= MOST_SPLIT_ROWS * weight.shape[1]
    multiply = split_linear.fp8_linear if few else scaled_mm.fp8_linear
    return multiply(x, weight, x_scale, weight_scale, bias, out_dtype)


def fp8_linear_of_halves(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``fp8_linear`` of a weight from ``scaled_products.prepare_halves``."""
    return fp8_linear(halved(x), weight, x_scale * 2, weight_scale, bias, out_dtype)
