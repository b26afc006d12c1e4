"""The op of latent attention by AITER's decode kernel.

Every query is a sequence of its own to it, which sees the tokens up to itself, and every cached
token a page. Argument mapping is tested with a function that computes on the processor; on a GPU it
was not run.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size, L cached tokens that are read.
Source: ``mla_decode_fwd`` in aiter/mla.py of ROCm/aiter, and op_tests/test_mla.py there: the cache
``[P S, 1, 1, C + R]``, starts, indices and lengths of last pages in int32, and the result in memory
that is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from interposer_ops.caches import cumulated, read_slots, slot_rows
from interposer_rocm._aiter.library import MLA_DECODE, function


class DecodeStep(NamedTuple):
    """The numbers of a step, all int32.

    Attributes:
        query_starts, key_starts: ``[T + 1]``.
        read: ``[L]`` slots of what each token sees, one after the other.
        last_page_lens: ``[T]``, ones.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    read: torch.Tensor
    last_page_lens: torch.Tensor

    @classmethod
    def of(cls, read: torch.Tensor, seen: torch.Tensor) -> DecodeStep:
        """Return a step whose tokens see ``seen`` ``[T]`` others, of slots ``read``."""
        return cls(
            torch.arange(len(seen) + 1, dtype=torch.int32, device=seen.device),
            cumulated(seen),
            read.to(torch.int32),
            torch.ones_like(seen, dtype=torch.int32),
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
    """Compute ``latent_attention_decode``."""
    num_tokens = len(query)
    if not num_tokens:
        return query.new_empty((*query.shape[:2], latent_size))
    rows, page_rows = slot_rows(cache)
    sequences = torch.arange(len(seq_lens), device=query.device)
    sequences = sequences.repeat_interleave(query_starts.diff(), output_size=num_tokens)
    # The last query of a sequence sees all of its tokens, the one before it one less.
    behind = query_starts[1:][sequences] - torch.arange(num_tokens, device=query.device) - 1
    seen = seq_lens[sequences] - behind
    read = read_slots(
        page_table[sequences], torch.zeros_like(seen), seen, cache.shape[1], page_rows
    )
    scales = {} if cache_scale is None else {"kv_scale": cache_scale}
    decode, step = function(MLA_DECODE), DecodeStep.of(read, seen)
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
    """Return ``[T, N, C]`` of queries ``[T, N, C + R]`` and the cache as rows ``[P S, C + R]``."""
    out = query.new_empty((*query.shape[:2], latent_size))
    pages = rows.view(-1, 1, 1, rows.shape[-1]) if rows.is_contiguous() else rows[:, None, None]
    decode(query.contiguous(), pages, out, *step, 1, sm_scale=scale, **scales)
    return out
