"""Latent attention by AITER's decode kernel.

Every query is a sequence of its own to it, which sees the tokens up to itself, and every cached
token a page. Argument mapping is tested with a function that computes on the processor; on a GPU it
was not run.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size.
"""

from __future__ import annotations

import torch

from interposer_ops.caches import cumulated, read_slots, slot_rows
from interposer_rocm._aiter.library import MLA_DECODE, function


def latent_attention_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_tokens: int,
    latent_size: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``latent_attention_decode``."""
    num_tokens, num_heads, width = query.shape
    out = query.new_empty((num_tokens, num_heads, latent_size))
    if not num_tokens:
        return out
    rows, page_rows = slot_rows(cache)
    sequences = torch.arange(len(seq_lens), device=query.device)
    sequences = sequences.repeat_interleave(query_starts.diff(), output_size=num_tokens)
    # The last query of a sequence sees all of its tokens, the one before it one less.
    behind = query_starts[1:][sequences] - torch.arange(num_tokens, device=query.device) - 1
    seen = seq_lens[sequences] - behind
    slots = read_slots(
        page_table[sequences], torch.zeros_like(seen), seen, cache.shape[1], page_rows
    )
    scales = {} if cache_scale is None else {"kv_scale": cache_scale}
    function(MLA_DECODE)(
        query.contiguous(),
        rows.view(-1, 1, 1, width) if rows.is_contiguous() else rows[:, None, None],
        out,
        torch.arange(num_tokens + 1, dtype=torch.int32, device=query.device),
        cumulated(seen),
        slots.to(torch.int32),
        torch.ones_like(seen, dtype=torch.int32),
        1,
        sm_scale=scale,
        **scales,
    )
    return out
