"""A kernel of one call and an addition."""

from __future__ import annotations

import torch


def shift(x: torch.Tensor, offset: torch.Tensor, places: int) -> torch.Tensor:
    """Return the op ``acme_shift``."""
    return torch.roll(x, places, -1).add_(offset)
