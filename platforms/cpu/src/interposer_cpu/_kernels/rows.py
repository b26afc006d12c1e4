"""Tensors as rows in memory. H elements of a row."""

from __future__ import annotations

import torch


def distances(x: torch.Tensor) -> tuple[int, int, int, int, int] | None:
    """Return sizes and strides of ``x`` as rows in two dimensions, None where it is none.

    Returns: how many outer and inner ones there are, the elements of each, and those between the
        outer and between the inner ones. Their order is that of their memory, so that a result
        without gaps lies as torch would lay it.
    """
    sizes, steps = x.shape, x.stride()
    width = sizes[-1]
    if x.is_contiguous():
        return x.numel() // max(width, 1), 1, width, width, width
    if steps[-1] != 1:
        return None
    if x.ndim == 2 and steps[0] >= width:
        return sizes[0], 1, width, steps[0], width
    if x.ndim == 3 and steps[1] >= width and steps[0] >= steps[1] * sizes[1]:
        return sizes[0], sizes[1], width, steps[0], steps[1]
    return None
