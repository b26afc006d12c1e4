"""Attention over a paged cache, for batches that mix prefill and decode.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, M pages of the
longest sequence, P pages, S page size, Q longest query, L = M S cached tokens.
"""

from __future__ import annotations

import torch

from interposer import Tolerance, custom_op
from interposer_ops.cases.attention import paged_attention_cases, paged_attention_sample

__all__ = ["paged_attention"]


@custom_op(
    "paged_attention",
    cases=paged_attention_cases,
    tolerance=Tolerance(roundings=6),
    sample=paged_attention_sample,
)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_tokens: int,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend from each sequence's newest tokens to what the cache holds of that sequence.

    out = softmax(cap(scale * q k^T) + mask) v with cap(s) = softcap * tanh(s / softcap), in
    float32 or wider. Head n reads kv head n // G. The query of sequence b stands at positions
    seq_lens[b] - query length .. seq_lens[b] - 1, its keys are already in the cache.

    Args:
        query: ``[T, N, D]``, any float dtype.
        key_cache: ``[P, S, K, D]``, dtype of ``query``.
        value_cache: ``[P, S, K, D]``, dtype of ``query``.
        page_table: ``[B, M]`` int64; entries beyond a sequence's pages are valid but unread.
        query_starts: ``[B + 1]`` int64, ascending, the last is T.
        seq_lens: ``[B]`` int64, each at least the query length.
        max_query_tokens: Q, at least 1; the longest query.
        scale: factor of the scores.
        causal: a token sees itself and what is before it; False sees the whole sequence.
        window_tokens: a token sees itself and the ``window_tokens - 1`` before it; None sees all.
        softcap: bound of the scores; None leaves them.
    Returns: ``[T, N, D]``, dtype of ``query``.
    Source: arXiv:1706.03762; arXiv:2305.13245 (GQA); arXiv:2309.06180 (paging).
    """
    num_tokens, num_heads, head_size = query.shape
    num_seqs = seq_lens.shape[0]
    num_kv_heads = key_cache.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    device = query.device

    # Every cached token of every sequence; slots beyond a sequence's length may hold anything.
    keys = key_cache[page_table].flatten(1, 2).to(wide)  # [B, L, K, D]
    values = value_cache[page_table].flatten(1, 2).to(wide)
    key_positions = torch.arange(keys.shape[1], device=device)  # [L]
    written = key_positions < seq_lens[:, None]  # [B, L]
    values = torch.where(written[:, :, None, None], values, 0)

    # Queries padded to one length, so that all shapes are static.
    offsets = torch.arange(max_query_tokens, device=device)  # [Q]
    query_lens = query_starts.diff()  # [B]
    rows = (query_starts[:-1, None] + offsets).clamp(max=max(num_tokens - 1, 0))  # [B, Q]
    queries = query[rows].to(wide).unflatten(2, (num_kv_heads, -1))  # [B, Q, K, G, D]
    query_positions = (seq_lens - query_lens)[:, None] + offsets  # [B, Q]

    scores = torch.einsum("bqkgd,blkd->bkgql", queries, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = query_positions[:, :, None] - key_positions  # [B, Q, L]
    visible = written[:, None, :].expand_as(distance)
    if causal:
        visible = visible & (distance >= 0)
    if window_tokens is not None:
        visible = visible & (distance < window_tokens)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    mixed = torch.einsum("bkgql,blkd->bqkgd", scores.softmax(-1), values)

    sequence = torch.bucketize(
        torch.arange(num_tokens, device=device), query_starts[1:], right=True
    )
    sequence = sequence.clamp(max=max(num_seqs - 1, 0))
    offset = torch.arange(num_tokens, device=device) - query_starts[sequence]
    return mixed[sequence, offset].reshape(num_tokens, num_heads, head_size).to(query.dtype)
