"""The op ``sparse_latent_attention`` by FlashMLA, if the package is installed.

FlashMLA's prefill function has no batch dimension: every query lists row indices into one matrix,
and the cache is that matrix. The same function therefore serves decode steps too; FlashMLA's
sparse decode function reads only 8-bit caches in a layout of its own. Call arguments are tested
on the CPU against a stand-in function; no GPU has run this module.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size, X selected tokens.
Source: ``flash_mla_sparse_fwd`` in flash_mla/flash_mla_interface.py of deepseek-ai/FlashMLA, the
checks of ``sparse_prefill_fwd`` in its csrc/api, and csrc/sm90/prefill/sparse: bfloat16, queries
``[T, N, 576]`` of 64 or 128 heads, rows ``[P S, 1, 576]``, indices ``[T, 1, X]`` in int32 with -1
for no token, and X a multiple of 128. Versions before 2025-09 lack the function.
"""

from __future__ import annotations

from importlib import import_module

import torch

from interposer import Request, Verdict
from interposer_cuda._providers import FLASH_MLA
from interposer_ops.caches import slot_rows


def judge(request: Request) -> Verdict:
    """Accept a cache of the request's dtype if flash_mla is installed."""
    cache_dtype = request.dims["cache_dtype"]
    if cache_dtype != request.dtype:
        return Verdict.refuse(f"reads caches of {request.dtype}, as queries are, got {cache_dtype}")
    return FLASH_MLA.judge()


def confirm(request: Request) -> Verdict:
    """Refuse if the import of flash_mla fails or the function's parameters differ."""
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
    """Compute ``sparse_latent_attention`` with FlashMLA, over a cache without a scale."""
    del cache_scale
    if not len(query):
        return query.new_empty((*query.shape[:2], latent_size))
    rows, page_rows = slot_rows(cache)
    page_size = cache.shape[1]
    # Indices of -1 look up position 0 here and become -1 again below.
    positions = indices.clamp(min=0).long()
    pages = page_table[sequences[:, None], positions // page_size]
    slots = pages * page_rows + positions % page_size
    selected_slots = torch.where(indices >= 0, slots, -1).to(torch.int32)
    attend = import_module("flash_mla").flash_mla_sparse_fwd
    out: torch.Tensor = attend(query.contiguous(), rows[:, None], selected_slots[:, None], scale)[0]
    return out
