"""The op of sparse latent attention by FlashMLA, where it is installed.

Its function for prompts has no batch: every query names rows of one matrix, which is the cache as
it lies. So it serves decode steps as well, whose own function reads caches of 8 bits only, in a
form of its own. Arguments are tested on the processor against a function of the same meaning; on a
GPU it was not run.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size, X named tokens.
Source: ``flash_mla_sparse_fwd`` in flash_mla/flash_mla_interface.py of deepseek-ai/FlashMLA, the
checks of ``sparse_prefill_fwd`` in its csrc/api, and csrc/sm90/prefill/sparse: bfloat16, queries
``[T, N, 576]`` of 64 or 128 heads, rows ``[P S, 1, 576]``, indices ``[T, 1, X]`` in int32 of which
-1 names nothing, and X a multiple of 128. Versions of before 2025-09 lack it.
"""

from __future__ import annotations

from importlib import import_module

import torch

from interposer import Request, Verdict
from interposer_cuda._providers import FLASH_MLA
from interposer_ops.caches import slot_rows


def judge(request: Request) -> Verdict:
    """Accept a cache of the request's dtype, where the package is installed."""
    stored = request.dims["cache_dtype"]
    if stored != request.dtype:
        return Verdict.refuse(f"reads caches of {request.dtype}, as queries are, got {stored}")
    return FLASH_MLA.judge()


def confirm(request: Request) -> Verdict:
    """Import the package, and refuse where that fails or the function is another."""
    del request
    return FLASH_MLA.confirm("flash_mla", {"flash_mla_sparse_fwd": {"q", "kv", "indices"}})


def sparse_latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    indices: torch.Tensor,
    latent_size: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``sparse_latent_attention`` of a cache without a scale."""
    del cache_scale
    if not len(query):
        return query.new_empty((*query.shape[:2], latent_size))
    rows, page_rows = slot_rows(cache)
    page_size = cache.shape[1]
    positions = indices.clamp(min=0).long()
    pages = page_table[sequences[:, None], positions // page_size]
    slots = pages * page_rows + positions % page_size
    named = torch.where(indices >= 0, slots, -1).to(torch.int32)
    attend = import_module("flash_mla").flash_mla_sparse_fwd
    out: torch.Tensor = attend(query.contiguous(), rows[:, None], named[:, None], scale)[0]
    return out
