"""Gated activations by torch functions, for any device.

torch's activations compute in float32 for every dtype, so that no wide copy is needed; the
multiplication by the other half is in place.

I intermediate size.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer_ops._declare import torch_kernel


@torch_kernel("silu_and_mul", "functional")
def silu_and_mul_functional(x: torch.Tensor) -> torch.Tensor:
    """Compute ``silu_and_mul`` by ``functional.silu``: ``[..., 2 I]`` to ``[..., I]``."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


@torch_kernel("gelu_and_mul", "functional")
def gelu_and_mul_functional(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute ``gelu_and_mul`` by ``functional.gelu``: ``[..., 2 I]`` to ``[..., I]``."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate=approximate).mul_(up)
