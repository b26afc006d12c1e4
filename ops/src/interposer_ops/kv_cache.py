"""Writing keys and values into a paged cache.

Dimensions: T tokens, K kv heads, D head size, P pages, S page size.
"""

from __future__ import annotations

import torch

from interposer import Tolerance, custom_op
from interposer_ops.cases.attention import reshape_and_cache_cases, reshape_and_cache_sample

__all__ = ["reshape_and_cache"]


@custom_op(
    "reshape_and_cache",
    cases=reshape_and_cache_cases,
    mutates=("key_cache", "value_cache"),
    tolerance=Tolerance(roundings=0),
    sample=reshape_and_cache_sample,
)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store each token's key and value in its slot.

    Padding goes to the slots of a page that nobody reads, so that every slot is valid.

    Args:
        key: ``[T, K, D]``, any float dtype.
        value: ``[T, K, D]``, dtype of ``key``.
        key_cache: ``[P, S, K, D]``, dtype of ``key``, written in place.
        value_cache: ``[P, S, K, D]``, dtype of ``key``, written in place.
        slots: ``[T]`` int64, page * S + offset, distinct.
    """
    page_size = key_cache.shape[1]
    pages, offsets = slots // page_size, slots % page_size
    key_cache[pages, offsets] = key
    value_cache[pages, offsets] = value
