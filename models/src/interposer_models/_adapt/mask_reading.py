"""Detection of a mask's pattern from its elements, for unknown mask functions.

Each supported pattern is generated and compared with every element of the mask. Reading elements
would synchronize with an accelerator, so only masks in host memory are read.

Dimensions: B sequences, T query tokens, U key tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer_models._adapt.mask_pattern import Pattern
from interposer_models._adapt.masks import MaskFacts


def read_mask(mask: Tensor, batch: int, num_queries: int, num_keys: int) -> MaskFacts | None:
    """Return the facts of a mask up to the last visible key, None if the mask has another pattern.

    Args:
        mask: ``[B or 1, 1, T, U]``, true where a query attends to a key.
    """
    if mask.dtype is not torch.bool or mask.ndim != 4 or mask.device.type != "cpu":
        return None
    if mask.shape[1:] != (1, num_queries, num_keys) or mask.shape[0] not in (1, batch):
        return None
    visible = mask[:, 0]
    # In all supported patterns the last query attends to the last visible key.
    last_row = visible[:, -1]
    counts = last_row.sum(1)
    ends = num_keys - last_row.flip(1).int().argmax(1)
    num_visible_keys = int(ends.max())
    if not int(counts.min()) or not num_visible_keys:
        return None
    if num_queries == 1:
        starts = ends - counts
        if not _is_range_mask(visible, starts, ends, num_keys):
            return None
        return _make_facts(Pattern(False), 1, num_visible_keys, batch, starts, counts)
    starts = visible.any(1).int().argmax(1)
    if _is_range_mask(visible, starts, ends, num_keys):
        return _make_facts(
            Pattern(False), num_queries, num_visible_keys, batch, starts, ends - starts
        )
    if int(ends.min()) != num_visible_keys:
        return None
    query_ends = ends[:, None] - torch.arange(num_queries - 1, -1, -1)
    if _is_range_mask(visible, starts[:, None], query_ends, num_keys):
        return _make_facts(
            Pattern(True), num_queries, num_visible_keys, batch, starts, ends - starts
        )
    # If a window hides keys, the last query attends to exactly one window of keys.
    window = int(counts.max())
    if _is_range_mask(
        visible, torch.maximum(starts[:, None], query_ends - window), query_ends, num_keys
    ):
        pattern = Pattern(True, window)
        return _make_facts(pattern, num_queries, num_visible_keys, batch, starts, ends - starts)
    return None


def _is_range_mask(visible: Tensor, starts: Tensor, ends: Tensor, num_keys: int) -> bool:
    """Return True if each query attends exactly to the keys from ``starts`` up to ``ends``."""
    keys = torch.arange(num_keys)
    if starts.ndim == 1:
        starts, ends = starts[:, None], ends[:, None]
    return torch.equal(
        visible, ((keys >= starts[..., None]) & (keys < ends[..., None])).expand_as(visible)
    )


def _make_facts(
    pattern: Pattern, num_queries: int, num_keys: int, batch: int, starts: Tensor, counts: Tensor
) -> MaskFacts:
    runs = tuple(zip(starts.tolist(), counts.tolist(), strict=True))
    if len(runs) < batch:
        runs *= batch
    is_unpadded = all(run == (0, num_keys) for run in runs)
    return MaskFacts(pattern, num_queries, num_keys, None if is_unpadded else runs)
