"""``fp8_linear`` by the products of vllm-xpu-kernels, which are oneDNN's.

These GPUs have no matrix instructions for 8-bit floats: either op converts to 16 bits, one of them
both operands, the other the weight alone. Arguments are tested against a package that plays the
ops on the processor; on a GPU they were not run.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch

from interposer_xpu._packages.kernel_package import op


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``fp8_linear``; one scale of an operand, or one per row of it."""
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x.new_zeros((*x.shape[:-1], len(weight)), dtype=out_dtype)
    out: torch.Tensor = op("_xpu_C", "fp8_gemm")(
        rows.contiguous(),
        weight.contiguous().t(),
        out_dtype,
        x_scale.reshape(-1, 1) if x_scale.numel() > 1 else x_scale.reshape(1),
        weight_scale.reshape(-1),
        bias,
    )
    return out.view(*x.shape[:-1], len(weight))


def fp8_linear_weights(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``fp8_linear`` of activations in ``out_dtype``, with the product of both scales.

    Either 8-bit format is exact in float16 and bfloat16.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x.new_zeros((*x.shape[:-1], len(weight)), dtype=out_dtype)
    out: torch.Tensor = op("_xpu_C", "fp8_gemm_w8a16")(
        rows.to(out_dtype).contiguous(),
        weight.contiguous().t(),
        (weight_scale * x_scale).reshape(-1),
        bias,
    )
    return out.view(*x.shape[:-1], len(weight))
