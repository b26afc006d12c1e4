"""Normalisation over the last dimension. H is the hidden size."""

from __future__ import annotations

import torch

# Elements up to which the calls cost more than the memory traffic.
_FEW = 1 << 15


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the op ``rms_norm``: in one call for few elements, with few passes for many.

    The norm is one reduction, so no squares are stored, and the products are done in place.
    """
    if x.numel() < _FEW:
        return torch.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    scaled = wide * scale if wide is x else wide.mul_(scale)
    return scaled.mul_(weight).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the op ``fused_add_rms_norm``; a wider sum is weighted before it is rounded."""
    total = x + residual
    if total.dtype == weight.dtype:
        return rms_norm(total, weight, eps), total
    unit = torch.rms_norm(total, weight.shape, None, eps)
    return unit.mul_(weight).to(x.dtype), total
