"""The precision that references compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or, where it is wider, in its own dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
