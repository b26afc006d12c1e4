"""The op ``fp8_linear`` by the FP8 GEMMs of vllm-xpu-kernels, which call oneDNN.

Intel GPUs have no matrix instructions for 8-bit floats. ``fp8_gemm`` converts both operands to
16 bits, ``fp8_gemm_w8a16`` converts the weight only. Call arguments are tested with a stand-in
package on the CPU; no GPU has run this module.

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
    """Compute the op ``fp8_linear`` with one scale per operand or one per row of an operand."""
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
    """Compute the op ``fp8_linear`` with ``x`` cast to ``out_dtype`` and both scales multiplied.

    The cast is exact: float16 and bfloat16 represent every value of both 8-bit formats.
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
