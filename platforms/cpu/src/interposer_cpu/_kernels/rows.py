"""Description of tensors as rows of contiguous elements, for native calls."""

from __future__ import annotations

import torch


def row_layout(x: torch.Tensor) -> tuple[int, int, int, int, int] | None:
    """View ``x`` as rows in two dimensions, outer and inner; None if that needs a copy.

    Only tensors with dimensions in the order of memory are viewed. A contiguous result then has the
    strides that torch would choose.

    Returns: number of outer rows, number of inner rows, elements of a row, outer stride, inner
        stride; strides in elements.
    """
    sizes, steps = x.shape, x.stride()
    width = sizes[-1]
    if x.is_contiguous():
        return x.numel() // max(width, 1), 1, width, width, width
    if steps[-1] != 1:
        return None
    # Larger strides than needed are gaps; smaller ones are a transposed or expanded tensor.
    if x.ndim == 2 and steps[0] >= width:
        return sizes[0], 1, width, steps[0], width
    if x.ndim == 3 and steps[1] >= width and steps[0] >= steps[1] * sizes[1]:
        return sizes[0], sizes[1], width, steps[0], steps[1]
    return None
