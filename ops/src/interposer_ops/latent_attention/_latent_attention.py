"""Multi-head latent attention (MLA) with absorbed projections: one latent vector per token.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size, Q longest query, L = M S cached tokens, X attended tokens.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import cached, masked_attention, softmax_attention

_op = partial(standard_op, cases="interposer_ops.latent_attention._latent_attention_cases")


@_op(
    "latent_attention_decode",
    tolerance=Tolerance(roundings=6),
    batched=("page_table", "seq_lens"),
    ragged={"query": "query_starts"},
)
def latent_attention_decode(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_tokens: int,
    latent_size: int,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """Attend causally from each sequence's newest tokens to its latent vectors in the cache.

    out = softmax(scale * q c^T + mask) c[:, :C], in float32 or wider: all heads share the cached
    vectors, whose first C elements are also the values. The queries of sequence b have positions
    seq_lens[b] - query length .. seq_lens[b] - 1; their vectors are already in the cache. Tokens of
    ``query``, pages of the cache and rows of ``page_table`` may be strided in memory.

    Args:
        query: ``[T, N, C + R]``, any float dtype.
        cache: ``[P, S, C + R]``, dtype of ``query`` or a narrower one.
        page_table, query_starts, seq_lens, max_query_tokens: as in ``paged_attention``.
        latent_size: C.
        scale: factor of the scores.
        cache_scale: ``[1]`` float32: factor of the stored elements; None: 1.
    Returns: ``[T, N, C]``, dtype of ``query``.
    Dims: num_heads, latent_size, rotary_size, page_size, cache_dtype (the name of a torch dtype),
    scaled: there is a ``cache_scale``.
    Source: arXiv:2405.04434.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = cached(cache, page_table, seq_lens, wide, cache_scale)[:, :, None]  # [B, L, 1, C + R]
    # Keys and values are the same vectors; the rotary part serves only the scores.
    values = keys[..., :latent_size]
    out, _ = masked_attention(query, keys, values, query_starts, seq_lens, max_query_tokens, scale)
    return out


@_op("sparse_latent_attention", tolerance=Tolerance(roundings=6))
def sparse_latent_attention(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    sequences: Tensor,
    indices: Tensor,
    latent_size: int,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """Attend from each token to the latent vectors that ``indices`` lists for the token.

    out = softmax(scale * q c^T) c[:, :C] over the listed vectors, in float32 or wider. A token
    without listed vectors gives zeros. Tokens of ``query`` and ``indices``, pages of the cache and
    rows of ``page_table`` may be strided in memory.

    Args:
        query, cache, latent_size, scale, cache_scale: as in ``latent_attention_decode``.
        page_table: ``[B, M]`` int64.
        sequences: ``[T]`` int64, the sequence of each token.
        indices: ``[T, X]`` int32: positions in the sequence, each at most once and in the cache; -1
            is padding, at any place.
    Returns: ``[T, N, C]``, dtype of ``query``.
    Dims: num_heads, latent_size, rotary_size, page_size, top_k, cache_dtype (the name of a torch
    dtype), scaled: there is a ``cache_scale``.
    Source: DeepSeek-V3.2-Exp technical report, DeepSeek sparse attention.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    page_size = cache.shape[1]
    is_listed = indices >= 0  # [T, X]
    positions = indices.clamp(min=0).long()
    pages = page_table[sequences[:, None], positions // page_size]
    keys = cache[pages, positions % page_size].to(wide)  # [T, X, C + R]
    keys = torch.where(is_listed[..., None], keys, 0)[:, :, None]
    if cache_scale is not None:
        keys = keys * cache_scale.to(wide)
    # Every token becomes a sequence of one query and X keys.
    queries, values = query[:, None].to(wide), keys[..., :latent_size]
    out, _ = softmax_attention(queries, keys, values, is_listed[:, None], scale)
    return out[:, 0].to(query.dtype)
