"""Products of 8-bit floats: of few rows by the portable kernel that splits sums, else hipBLASLt.

Compiled, not executed on a GPU. Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch

from interposer_ops.quantized_linear import fp8_linear_scaled_mm
from interposer_ops.triton import MOST_SPLIT_ROWS, fp8_linear_split
from interposer_rocm._scaled_products import halved


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
    multiply = fp8_linear_split if few else fp8_linear_scaled_mm
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
