"""Rows of the states of layers, copied to where another sequence or a checkpoint has its own.

Dimensions: N slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

States = Sequence[tuple[Tensor, ...]]
"""Of each layer with a state, the tensors ``[N, ...]`` of its ``StateLayout``."""


def copy_rows(
    source: States, source_rows: Sequence[int], target: States, target_rows: Sequence[int]
) -> None:
    """Write rows of all states of ``source`` to rows of ``target``, in the order given.

    Args:
        target: of the same layers, with any number of rows. It may be ``source``: all rows are
            read before one is written.
    """
    pairs = [pair for both in zip(source, target, strict=True) for pair in zip(*both, strict=True)]
    if len(source_rows) == 1:
        for read, written in pairs:
            written[target_rows[0]].copy_(read[source_rows[0]])
    elif source_rows and pairs:
        places = torch.tensor([source_rows, target_rows], device=pairs[0][0].device)
        for read, written in pairs:
            written.index_copy_(0, places[1], read.index_select(0, places[0]))
