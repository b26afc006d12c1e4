"""Attention over a paged cache, for batches that mix prefill and decode.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, M pages of the
longest sequence, P pages, S page size, Q longest query, L = M S cached tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import cached, masked_attention


@standard_op(
    "paged_attention",
    cases="interposer_ops.attention._paged_attention_cases",
    tolerance=Tolerance(roundings=6),
    batched=("page_table", "seq_lens", "prefix_lens"),
    ragged={"query": "query_starts"},
)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_tokens: int,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Attend from each sequence's newest tokens to all tokens of that sequence in the cache.

    out = softmax(cap(scale * q k^T) + bias + mask) v with cap(s) = softcap * tanh(s / softcap) and
    bias = -slope * |distance|, in float32 or wider. Head n reads kv head n // G. The queries of
    sequence b have positions seq_lens[b] - query length .. seq_lens[b] - 1; their keys are already
    in the cache. Memory layout: tokens of ``query``, pages of the caches and rows of ``page_table``
    may be strided; inner dimensions are contiguous.

    Args:
        query: ``[T, N, D]``, any float dtype.
        key_cache: ``[P, S, K, D]``, dtype of ``query`` or a narrower one.
        value_cache: ``[P, S, K, D]``, dtype of ``key_cache``.
        page_table: ``[B, M]`` int64; entries beyond a sequence's pages are valid but unread.
        query_starts: ``[B + 1]`` int64, ascending, the last is T.
        seq_lens: ``[B]`` int64, each at least the query length.
        max_query_tokens: Q, at least 1; no query is longer.
        scale: factor of the scores.
        causal: a token sees itself and earlier tokens; False: the whole sequence.
        window_tokens: a token sees itself and the ``window_tokens - 1`` tokens before; None: no
            window.
        softcap: bound of the scores; None: no bound.
        sinks: ``[N]``, any float dtype: one extra score per head that joins the softmax without a
            value.
        alibi_slopes: ``[N]`` float32, at least 0: decrease of the score per token of distance.
        prefix_lens: ``[B]`` int64: tokens of a sequence's prefix see each other in both directions,
            as far as they are in the cache; the window also applies to them.
        key_scale: ``[1]`` or ``[K]`` float32: factor of the stored keys; None: 1.
        value_scale: ``[1]`` or ``[K]`` float32: factor of the stored values; None: 1.
    Returns: ``[T, N, D]``, dtype of ``query``.
    Dims: num_heads, num_kv_heads, head_size, page_size, windowed, softcapped, sinks, alibi,
    prefix_lm, causal, cache_dtype (the name of a torch dtype), scaled: keys and values have scales,
    per_head: one scale per kv head.
    Source: arXiv:1706.03762; arXiv:2305.13245 (GQA); arXiv:2309.06180 (paging); arXiv:2108.12409
        (ALiBi); arXiv:2309.17453 (sinks); arXiv:1910.10683 (prefix-LM).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = cached(key_cache, page_table, seq_lens, wide, key_scale)  # [B, L, K, D]
    values = cached(value_cache, page_table, seq_lens, wide, value_scale)
    masks = causal, window_tokens, softcap, sinks, alibi_slopes, prefix_lens
    out, _ = masked_attention(
        query, keys, values, query_starts, seq_lens, max_query_tokens, scale, *masks
    )
    return out
