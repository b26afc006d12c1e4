"""Writing keys and values into a paged cache."""

from __future__ import annotations

import torch

from interposer_ops.caches import reshape_and_cache as reshape_and_cache_op


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Do the op ``reshape_and_cache`` with slots as rows, where the caches have such a view."""
    if key_cache.is_contiguous() and value_cache.is_contiguous():
        key_cache.flatten(0, 1).index_copy_(0, slots, key)
        value_cache.flatten(0, 1).index_copy_(0, slots, value)
    else:
        reshape_and_cache_op.reference(key, value, key_cache, value_cache, slots)
