"""Norm kernels built on the one that torch brings along. H is the hidden size."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["fused_add_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x`` normalised, ``[..., H]``, by torch's own op, which accumulates in float32."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(normalised sum, sum)`` of ``x`` and ``residual``, each ``[..., H]``."""
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, eps), total
