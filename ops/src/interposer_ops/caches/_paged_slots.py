"""Where the cached tokens lie that a step reads, one after the other.

Dimensions: B sequences, P pages of the longest sequence, L cached tokens that are read.
"""

from __future__ import annotations

import torch


def cumulated(lengths: torch.Tensor) -> torch.Tensor:
    """Return ``[B + 1]`` int32 starts of parts of ``lengths`` ``[B]``, and where the last ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def read_slots(
    page_table: torch.Tensor,
    firsts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    page_rows: int | None = None,
) -> torch.Tensor:
    """Return ``[L]`` int64 slots of each sequence's tokens from ``firsts`` on.

    It waits for the device once, to know how many there are.

    Args:
        page_table: ``[B, P]``.
        firsts, lengths: ``[B]``.
        page_rows: from one page to the next; the page size unless pages lie apart in memory.
    """
    total = int(lengths.sum())
    device = page_table.device
    rows = torch.arange(len(lengths), device=device)
    rows = rows.repeat_interleave(lengths.long(), output_size=total)
    begins = lengths.long().cumsum(0) - lengths
    positions = torch.arange(total, device=device) - (begins - firsts)[rows]
    pages = page_table[rows, positions // page_size].long()
    return pages * (page_rows or page_size) + positions % page_size
