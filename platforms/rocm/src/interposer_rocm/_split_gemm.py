"""The op ``fp8_linear``: split-K Triton kernel for few rows, hipBLASLt for more.

Compiled for AMD GPUs, but no GPU has run this module. Dimensions: T tokens, I input features, O
output features.
"""

from __future__ import annotations

import torch

from interposer_ops.quantized_linear import fp8_linear_scaled_mm
from interposer_ops.triton import MOST_SPLIT_ROWS, fp8_linear_split
from interposer_rocm._scaled_gemm import halved


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``fp8_linear`` with split-K for few rows, with hipBLASLt for more rows."""
    # A few rows leave most compute units idle unless the sum over I is split among them.
    is_small = x.numel() <= MOST_SPLIT_ROWS * weight.shape[1]
    matmul = fp8_linear_split if is_small else fp8_linear_scaled_mm
    return matmul(x, weight, x_scale, weight_scale, bias, out_dtype)


def fp8_linear_of_halves(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``fp8_linear`` by split-K or hipBLASLt, with weights of ``prepare_halves``."""
    return fp8_linear(halved(x), weight, x_scale * 2, weight_scale, bias, out_dtype)
