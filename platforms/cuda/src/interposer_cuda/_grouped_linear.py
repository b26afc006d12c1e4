"""Projections of rows in groups by torch's grouped product.

Results are tested on the processor, where torch multiplies group by group; on a GPU it was not run.

Dimensions: T tokens, I input features, O output features, E experts.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_ALIGNED_BYTES = 16


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, group_starts: torch.Tensor
) -> torch.Tensor:
    """Compute ``grouped_linear``; the host waits for nothing.

    Source: torch's documentation of ``grouped_mm``: ends of groups in int32, rows and matrices
    that begin at multiples of 16 bytes; rows behind the last group are left as they are.
    """
    if not x.shape[0]:
        return x.new_zeros((0, weight.shape[1]))
    rows, matrices = _aligned(x), _aligned(weight)
    ends = group_starts[1:].to(torch.int32)
    out = functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    behind = torch.arange(len(rows), device=x.device) >= group_starts[-1]
    return out.masked_fill_(behind[:, None], 0)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNED_BYTES else tensor
