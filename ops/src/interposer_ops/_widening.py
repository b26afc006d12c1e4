"""The dtype in which references compute."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Convert ``x`` to float32, unless the dtype of ``x`` is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
