"""Projections with quantized weights. I input features, O output features, G inputs per scale."""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer import Tolerance, custom_op
from interposer_quantization.cases import w8a16_linear_cases, w8a16_linear_sample

__all__ = ["w8a16_linear"]


@custom_op(
    "w8a16_linear",
    cases=w8a16_linear_cases,
    constants=("weight", "scale", "bias"),
    tolerance=Tolerance(roundings=2),
    sample=w8a16_linear_sample,
)
def w8a16_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Project ``x`` by int8 weights that are symmetric around zero.

    y = x (weight * scale)^T + bias; each scale holds for G inputs of one output. Dequantized
    weights and sums are float32 or wider.

    Args:
        x: ``[..., I]``, any float dtype.
        weight: ``[O, I]`` int8.
        scale: ``[O, I / G]`` float32; ``[O, 1]`` is one per output.
        bias: ``[O]``, dtype of ``x``, or None.
    Returns: ``[..., O]``, dtype of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    grouped = weight.to(wide).unflatten(1, (scale.shape[1], -1))  # [O, I / G, G]
    dequantized = (grouped * scale.to(wide).unsqueeze(-1)).flatten(1)
    offset = None if bias is None else bias.to(wide)
    return functional.linear(x.to(wide), dequantized, offset).to(x.dtype)
