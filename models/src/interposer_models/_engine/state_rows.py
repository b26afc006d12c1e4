"""Copies between rows of recurrent state tensors.

Dimensions: N slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

States = Sequence[tuple[Tensor, ...]]
"""For each recurrent layer, the tensors ``[N, ...]`` of its ``StateLayout``."""


def copy_rows(
    source: States, source_rows: Sequence[int], target: States, target_rows: Sequence[int]
) -> None:
    """Copy rows of all state tensors of ``source`` to rows of ``target``, in the given order.

    Args:
        target: Tensors of the same layers, with any number of rows. May be ``source``: all rows are
            read before the first is written.
    """
    pairs = [pair for both in zip(source, target, strict=True) for pair in zip(*both, strict=True)]
    # A copy of one row needs no index tensors on the device.
    if len(source_rows) == 1:
        for source_tensor, target_tensor in pairs:
            target_tensor[target_rows[0]].copy_(source_tensor[source_rows[0]])
    elif source_rows and pairs:
        rows = torch.tensor([source_rows, target_rows], device=pairs[0][0].device)
        for source_tensor, target_tensor in pairs:
            target_tensor.index_copy_(0, rows[1], source_tensor.index_select(0, rows[0]))
