"""Norm kernels of a few torch calls. H is the hidden size."""

from __future__ import annotations

import torch

# Elements up to which one call is faster than several that write less.
_FEW = 1 << 15


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the op ``rms_norm``: ``x`` normalised, ``[..., H]``."""
    if x.numel() <= _FEW:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return _scaled(x, eps).mul_(weight).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the op ``fused_add_rms_norm``: ``(normalised sum, sum)``, each ``[..., H]``."""
    total = x + residual
    if total.dtype == weight.dtype:
        return rms_norm(total, weight, eps), total
    few = total.numel() <= _FEW
    unit = torch.rms_norm(total, weight.shape, None, eps) if few else _scaled(total, eps)
    return unit.mul_(weight).to(x.dtype), total


def _scaled(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x`` at unit root mean square, in float32; a dot product stores no squares."""
    wide = x.float()
    scale = torch.rsqrt(torch.linalg.vecdot(wide, wide) / x.shape[-1] + eps).unsqueeze(-1)
    return wide * scale if wide is x else wide.mul_(scale)
