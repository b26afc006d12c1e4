"""The functions. H is the hidden size, I and O are input and output features."""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x`` normalised, ``[..., H]``, in float64 on the way."""
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the projection; ``weight`` is ``[I, O]``, as ``transpose`` makes it."""
    product = torch.matmul(x, weight)
    return product if bias is None else product + bias


def transpose(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Return the constants as ``linear`` wants them."""
    return {"weight": weight.t().contiguous(), "bias": bias}


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return the second half of ``x``, gated by the SiLU of the first."""
    gate, up = x.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)
