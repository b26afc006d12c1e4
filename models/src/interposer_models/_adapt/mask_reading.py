"""The meaning of a mask whose function is not known, read from its numbers.

A mask that is one of the patterns that kernels know is found by making that pattern and comparing
every element. This waits for the numbers, so that it is for masks in the host's memory.

Dimensions: B sequences, T query tokens, U key tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer_models._adapt.mask_pattern import Pattern
from interposer_models._adapt.masks import MaskFacts


def read_mask(mask: Tensor, batch: int, num_queries: int, num_keys: int) -> MaskFacts | None:
    """Return the facts of a mask for the keys up to the last that is seen, None if it has another.

    Args:
        mask: ``[B or 1, 1, T, U]``, true where a query sees a key.
    """
    if mask.dtype is not torch.bool or mask.ndim != 4 or mask.device.type != "cpu":
        return None
    if mask.shape[1:] != (1, num_queries, num_keys) or mask.shape[0] not in (1, batch):
        return None
    seen = mask[:, 0]
    last = seen[:, -1]
    counts = last.sum(1)
    ends = num_keys - last.flip(1).int().argmax(1)
    longest = int(ends.max())
    if not int(counts.min()) or not longest:
        return None
    if num_queries == 1:
        starts = ends - counts
        if not _equal(seen, starts, ends, num_keys):
            return None
        return _facts(Pattern(False), 1, longest, batch, starts, counts)
    starts = seen.any(1).int().argmax(1)
    if _equal(seen, starts, ends, num_keys):
        return _facts(Pattern(False), num_queries, longest, batch, starts, ends - starts)
    if int(ends.min()) != longest:
        return None
    upto = ends[:, None] - torch.arange(num_queries - 1, -1, -1)
    if _equal(seen, starts[:, None], upto, num_keys):
        return _facts(Pattern(True), num_queries, longest, batch, starts, ends - starts)
    # The last query sees as many keys as a window has, wherever the window hides some.
    window = int(counts.max())
    if _equal(seen, torch.maximum(starts[:, None], upto - window), upto, num_keys):
        pattern = Pattern(True, window)
        return _facts(pattern, num_queries, longest, batch, starts, ends - starts)
    return None


def _equal(seen: Tensor, starts: Tensor, ends: Tensor, num_keys: int) -> bool:
    """Say whether each query sees the keys from its start to its end, and no others."""
    keys = torch.arange(num_keys)
    if starts.ndim == 1:
        starts, ends = starts[:, None], ends[:, None]
    return torch.equal(
        seen, ((keys >= starts[..., None]) & (keys < ends[..., None])).expand_as(seen)
    )


def _facts(
    pattern: Pattern, num_queries: int, num_keys: int, batch: int, starts: Tensor, counts: Tensor
) -> MaskFacts:
    runs = tuple(zip(starts.tolist(), counts.tolist(), strict=True))
    if len(runs) < batch:
        runs *= batch
    whole = all(run == (0, num_keys) for run in runs)
    return MaskFacts(pattern, num_queries, num_keys, None if whole else runs)
