"""Normalisation whose result is quantized at once. H is the hidden size."""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op

_CASES = "interposer_ops.norms._quantized_norms_cases"


# The cases stay clear of what rounds either way, so that every kernel finds the same numbers.
@standard_op(
    "rms_norm_quantize_fp8",
    cases=_CASES,
    constants=("weight",),
    tolerance=Tolerance(roundings=0),
    batched=("x",),
)
def rms_norm_quantize_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Normalise each row of ``x`` and quantize the result by one scale.

    q = round(clamp(rms_norm(x, weight, eps) / scale, -m, m)), halves to even, where m is the
    largest number of ``out_dtype``. The normalised row is not rounded to the dtype of ``x`` on the
    way.

    Args:
        x: ``[..., H]``, any float dtype of at least 16 bits; rows may lie apart.
        weight: ``[H]``, dtype of ``x``.
        scale: ``[1]``, float32, above 0: what a quantized 1 stands for.
        out_dtype: of 8 bits.
    Returns: shape of ``x``, ``out_dtype``.
    Dims: hidden_size, out_dtype.
    Source: arXiv:2209.05433 for the number formats; arXiv:1910.07467 for the norm.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight / scale
    largest = torch.finfo(out_dtype).max
    return y.clamp(-largest, largest).to(out_dtype)
