"""Norms by torch functions, for any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer_ops._declare import torch_kernel

# Number of elements below which the calls into torch take longer than the memory traffic.
_SMALL_INPUT = 1 << 15


@torch_kernel("rms_norm", "vector_norm")
def rms_norm_vector_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``rms_norm``: small inputs in one call, large inputs in few passes over memory.

    ``vector_norm`` is one reduction that stores no squares; the multiplications are in place.
    """
    if x.numel() < _SMALL_INPUT:
        return torch.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    scaled = wide * scale if wide is x else wide.mul_(scale)
    return scaled.mul_(weight).to(x.dtype)


@torch_kernel("fused_add_rms_norm", "vector_norm")
def fused_add_rms_norm_vector_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``fused_add_rms_norm``; a sum wider than ``weight`` is scaled before the rounding."""
    total = x + residual
    if total.dtype == weight.dtype:
        return rms_norm_vector_norm(total, weight, eps), total
    unit = torch.rms_norm(total, weight.shape, None, eps)
    return unit.mul_(weight).to(x.dtype), total


@torch_kernel("qk_norm", "functional")
def qk_norm_functional(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``qk_norm`` by one call for the query and one for the key."""
    size = query_weight.shape
    normalised = (
        torch.rms_norm(query, size, query_weight, eps),
        torch.rms_norm(key, size, key_weight, eps),
    )
    return normalised[0].contiguous(), normalised[1].contiguous()


@torch_kernel("layer_norm", "functional")
def layer_norm_functional(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute ``layer_norm`` in one call."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
