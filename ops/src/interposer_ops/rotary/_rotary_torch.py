"""Rotary position embedding by torch's fused multiply-add (``addcmul``), for any device.

T tokens, N heads, D head size, R rotated size.
"""

from __future__ import annotations

import torch

from interposer_ops._declare import torch_kernel

# Number of elements above which new temporaries cost more time than in-place passes over one copy.
_LARGE_INPUT = 1 << 20


@torch_kernel("rotary_embedding", "addcmul")
def rotary_embedding_addcmul(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``rotary_embedding``; every second multiplication is fused with an addition."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    if x.dtype == cos.dtype and x.numel() < _LARGE_INPUT:
        a, b = _halves(x, half)
        first = torch.mul(a, cos).addcmul_(b, sin, value=-1)
        second = torch.mul(b, cos).addcmul_(a, sin)
        if x.shape[-1] == 2 * half:
            return torch.cat((first, second), dim=-1)
        return torch.cat((first, second, x[..., 2 * half :]), dim=-1)
    wide = x.to(cos.dtype, copy=True, memory_format=torch.contiguous_format)
    a, b = _halves(wide, half)
    b_sin = b * sin
    b.mul_(cos).addcmul_(a, sin)
    a.mul_(cos).sub_(b_sin)
    return wide.to(x.dtype)


def _halves(x: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (x if x.shape[-1] == 2 * half else x[..., : 2 * half]).chunk(2, dim=-1)
    return a, b
