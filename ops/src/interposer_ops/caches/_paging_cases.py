"""Paged caches and batches for test cases.

Dimensions: K kv heads, D head size, B sequences, M pages of the longest sequence, P pages, S page
size.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Pages of no sequence, which kernels must not touch.
SPARE_PAGES = 3


def attention_dims(
    heads: int, kv_heads: int, head_size: int, page_size: int
) -> dict[str, int | bool]:
    """Return the dims of an ``AttentionSpec`` of given sizes, without window and softcap."""
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": head_size}
    return {**sizes, "page_size": page_size, "windowed": False, "softcapped": False}


def scattered(
    seq_lens: list[int], page_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a page table ``[B, M]`` of shuffled pages, and the slots of all cached tokens.

    Every entry of the table has its own page; entries beyond a sequence's pages point to empty
    pages.
    """
    longest = max((-(-tokens // page_size) for tokens in seq_lens), default=0)
    count = len(seq_lens) * longest
    pages = torch.randperm(count + SPARE_PAGES, generator=generator)[:count]
    table = pages.view(len(seq_lens), longest)
    slots = [
        table[b, torch.arange(tokens) // page_size] * page_size + torch.arange(tokens) % page_size
        for b, tokens in enumerate(seq_lens)
    ]
    return table, torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64)


def caches(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two caches ``[P, S, K, D]`` filled with NaN, or with -128 for integers."""
    # A kernel that reads an unwritten slot then returns NaN or a wrong large number.
    filler = torch.nan if dtype.is_floating_point else -128.0
    keys, values = torch.full((2, *shape), filler).to(dtype)
    return keys, values


def starts_of(lengths: list[int]) -> Tensor:
    """Return the first row of every sequence, and the total number of rows, ``[B + 1]`` int64."""
    return torch.tensor([0, *lengths]).cumsum(0)
