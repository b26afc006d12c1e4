"""Sparse attention for any device that processes a few tokens at a time, to save memory.

The references gather the keys of every token, T L D elements; these kernels gather the keys of a
few tokens at a time. T tokens, I indexer heads, D size of an indexer head, L keys of a sequence, X
attended tokens, C latent size, R rotary size.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from interposer import Requires
from interposer_ops._declare import standard_kernel
from interposer_ops.latent_attention._latent_attention import sparse_latent_attention

# Not graph-safe, as the host reads numbers of tokens; preferred to the references for memory.
_in_turn = partial(
    standard_kernel,
    technique="in_turn",
    requires=Requires(dtypes=("float32", "bfloat16", "float16")),
    score=5.0,
    properties=frozenset({"deterministic", "opaque"}),
)

_MAX_ELEMENTS = 2**22
"""Largest number of gathered elements, unless a single token needs more."""


@_in_turn("indexer_scores")
def indexer_scores_in_turn(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_seq_tokens: int,
    key_scales: Tensor | None = None,
) -> Tensor:
    """Compute ``indexer_scores``, one sequence after the other."""
    wide = torch.promote_types(query.dtype, torch.float32)
    num_heads, page_size = query.shape[1], keys.shape[1]
    shape = (query.shape[0], max_seq_tokens)
    scores = torch.full(shape, -torch.inf, dtype=wide, device=query.device)
    weights = weights.to(wide)[:, None]  # [T, 1, I]
    spans = pairwise(query_starts.tolist())
    for pages, (start, stop), length in zip(page_table, spans, seq_lens.tolist(), strict=True):
        if start == stop:
            continue
        # Only the pages of this sequence; the table is as wide as the longest sequence needs.
        pages = pages[: -(-length // page_size)]
        cached_keys = keys[pages].flatten(0, 1)[:length].to(wide)  # [L, D]
        if key_scales is not None:
            cached_keys = cached_keys * key_scales[pages].flatten()[:length, None].to(wide)
        step = max(1, _MAX_ELEMENTS // (num_heads * length))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            raw_scores = query[first:last].to(wide).flatten(0, 1) @ cached_keys.T  # [tokens I, L]
            raw_scores = raw_scores.relu_().unflatten(0, (-1, num_heads))
            scores[first:last, :length] = torch.bmm(weights[first:last], raw_scores)[:, 0]
        positions = torch.arange(length - (stop - start), length, device=query.device)
        later = torch.arange(length, device=query.device) > positions[:, None]
        scores[start:stop, :length].masked_fill_(later, -torch.inf)
    return scores


@_in_turn("sparse_latent_attention")
def sparse_latent_attention_in_turn(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    sequences: Tensor,
    indices: Tensor,
    latent_size: int,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """Compute ``sparse_latent_attention`` by its reference, for a few tokens at a time."""
    num_tokens, num_listed = indices.shape
    out = query.new_empty(*query.shape[:2], latent_size)
    step = max(1, _MAX_ELEMENTS // max(1, num_listed * cache.shape[2]))
    for first in range(0, num_tokens, step):
        batch = slice(first, first + step)
        out[batch] = sparse_latent_attention.reference(
            query[batch],
            cache,
            page_table,
            sequences[batch],
            indices[batch],
            latent_size,
            scale,
            cache_scale,
        )
    return out
