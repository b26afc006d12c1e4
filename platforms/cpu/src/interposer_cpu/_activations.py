"""Gated activations. I is the intermediate size.

torch's own activations compute in float32 whatever the dtype, so that no wide copy is needed;
the product overwrites what they returned.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return the op ``silu_and_mul``: ``[..., 2 I]`` to ``[..., I]``."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Return the op ``gelu_and_mul``: ``[..., 2 I]`` to ``[..., I]``."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate=approximate).mul_(up)
