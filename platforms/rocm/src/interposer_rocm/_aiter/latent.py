"""The op ``latent_attention_decode`` by AITER's MLA decode kernel.

Every query is passed as a separate sequence that ends at the query's own token, and every cached
token as a page of size 1. Argument mapping is tested with a function that computes on the CPU; no
GPU has run this module.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size, L cached tokens that are read.
Source: ``mla_decode_fwd`` in aiter/mla.py of ROCm/aiter, and its op_tests/test_mla.py: the cache
``[P S, 1, 1, C + R]``, starts, indices and lengths of last pages in int32, and a preallocated
output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from interposer_ops.caches import cumulated, read_slots, slot_rows
from interposer_rocm._aiter.library import MLA_DECODE, function


class DecodeStep(NamedTuple):
    """Index tensors of a step, all int32, in the order of ``mla_decode_fwd``'s parameters.

    Attributes:
        query_starts, key_starts: ``[T + 1]``.
        slots: ``[L]`` cache slots that each query reads, query by query.
        last_page_lens: ``[T]``, ones.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    slots: torch.Tensor
    last_page_lens: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor, visible_tokens: torch.Tensor) -> DecodeStep:
        """Create a step: query t reads the next ``visible_tokens[t]`` entries of ``slots``."""
        return cls(
            torch.arange(len(visible_tokens) + 1, dtype=torch.int32, device=visible_tokens.device),
            cumulated(visible_tokens),
            slots.to(torch.int32),
            torch.ones_like(visible_tokens, dtype=torch.int32),
        )


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
    """Compute the op ``latent_attention_decode`` with AITER."""
    num_tokens = len(query)
    if not num_tokens:
        return query.new_empty((*query.shape[:2], latent_size))
    rows, page_rows = slot_rows(cache)
    sequences = torch.arange(len(seq_lens), device=query.device)
    sequences = sequences.repeat_interleave(query_starts.diff(), output_size=num_tokens)
    # Causal mask: the last query of a sequence sees all its tokens, each earlier query one fewer.
    queries_after = query_starts[1:][sequences] - torch.arange(num_tokens, device=query.device) - 1
    visible_tokens = seq_lens[sequences] - queries_after
    slots = read_slots(
        page_table[sequences],
        torch.zeros_like(visible_tokens),
        visible_tokens,
        cache.shape[1],
        page_rows,
    )
    scales = {} if cache_scale is None else {"kv_scale": cache_scale}
    decode, step = function(MLA_DECODE), DecodeStep.of(slots, visible_tokens)
    return run_decode(decode, query, rows, step, latent_size, scale, **scales)


def run_decode(
    decode: Callable[..., Any],
    query: torch.Tensor,
    rows: torch.Tensor,
    step: DecodeStep,
    latent_size: int,
    scale: float,
    **scales: torch.Tensor,
) -> torch.Tensor:
    """Attend from every query to the listed cache rows, by AITER's MLA decode function.

    Args:
        query: ``[T, N, C + R]``.
        rows: ``[P S, C + R]``, the cache.
    Returns: ``[T, N, C]``.
    """
    out = query.new_empty((*query.shape[:2], latent_size))
    pages = rows.view(-1, 1, 1, rows.shape[-1]) if rows.is_contiguous() else rows[:, None, None]
    decode(query.contiguous(), pages, out, *step, 1, sm_scale=scale, **scales)
    return out
