"""Writing keys and values into a paged cache with torch's ``index_copy_``."""

from __future__ import annotations

import torch

from interposer_ops._declare import torch_kernel
from interposer_ops.caches._kv_cache import reshape_and_cache


@torch_kernel("reshape_and_cache", "index_copy")
def reshape_and_cache_index_copy(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Compute ``reshape_and_cache`` on a flat view, if the caches are contiguous."""
    if key_cache.is_contiguous() and value_cache.is_contiguous():
        key_cache.flatten(0, 1).index_copy_(0, slots, key)
        value_cache.flatten(0, 1).index_copy_(0, slots, value)
    else:
        reshape_and_cache.reference(key, value, key_cache, value_cache, slots)
