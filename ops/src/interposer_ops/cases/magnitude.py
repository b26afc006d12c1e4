"""Bounds of what passes through a sum, for the tolerances of cases."""

from __future__ import annotations

import torch

__all__ = ["peak"]


def peak(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, 0 of no elements."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
