"""Normalisation over the last dimension. H is the hidden size."""

from __future__ import annotations

import torch

from interposer import Tolerance, custom_op
from interposer_ops.cases.norms import (
    fused_add_rms_norm_cases,
    fused_add_rms_norm_sample,
    rms_norm_cases,
    rms_norm_sample,
)

__all__ = ["fused_add_rms_norm", "rms_norm"]


@custom_op(
    "rms_norm",
    cases=rms_norm_cases,
    constants=("weight",),
    tolerance=Tolerance(roundings=3),
    sample=rms_norm_sample,
    batched=("x",),
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of ``x`` to unit root mean square, then by ``weight``.

    y = x / sqrt(mean(x^2) + eps) * weight, accumulated in float32 or wider.

    Args:
        x: ``[..., H]``, any float dtype.
        weight: ``[H]``, dtype of ``x``.
    Returns: shape and dtype of ``x``.
    Source: arXiv:1910.07467.
    """
    return _normalise(x, weight, eps).to(x.dtype)


@custom_op(
    "fused_add_rms_norm",
    cases=fused_add_rms_norm_cases,
    constants=("weight",),
    tolerance=Tolerance(roundings=4),
    sample=fused_add_rms_norm_sample,
    batched=("x", "residual"),
)
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    s = x + residual; y = rms_norm(s, weight, eps)

    The sum is rounded to the residual's dtype before it is normalised, so that the residual that
    is returned is the one that was normalised.

    Args:
        x: ``[..., H]``, any float dtype.
        residual: shape of ``x``; its dtype, or float32 to keep the stream exact.
        weight: ``[H]``, dtype of ``x``.
    Returns: ``(y, s)`` of the shape of ``x``: y in the dtype of ``x``, s in that of ``residual``.
    """
    total = x + residual
    return _normalise(total, weight, eps).to(x.dtype), total


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
