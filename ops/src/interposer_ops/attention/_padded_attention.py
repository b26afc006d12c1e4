"""Reference attention over sequences padded to one length, shared by several ops.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, E size of a value, B sequences, Q
longest query, L keys of a padded sequence, P pages, S page size, M pages of the longest sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_lens: Tensor,
    max_query_tokens: int,
    scale: float,
    causal: bool = True,
    window_tokens: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    *,
    looks_ahead: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute masked attention of each sequence's queries to its keys, and the log-sum-exp.

    The last query of a sequence has the position of the last key, whatever the numbers of both.

    Args:
        query: ``[T, N, D]``, any float dtype.
        keys: ``[B, L, K, D]``, float32 or wider.
        values: ``[B, L, K, E]``, dtype of ``keys``, finite.
        query_starts: ``[B + 1]`` int64, ascending, the last is T.
        key_lens: ``[B]`` int64.
        max_query_tokens: Q.
        looks_ahead: the window reaches as far ahead as back.
    Returns: ``[T, N, E]``, dtype of ``query``; ``[T, N]``, dtype of ``keys``.
    """
    wide = keys.dtype
    key_positions = torch.arange(keys.shape[1], device=query.device)  # [L]
    offsets = torch.arange(max_query_tokens, device=query.device)  # [Q]
    query_positions = (key_lens - query_starts.diff())[:, None] + offsets  # [B, Q]
    distance = query_positions[:, :, None] - key_positions  # [B, Q, L]
    # Positions after a sequence's last key are padding.
    visible = (key_positions < key_lens[:, None])[:, None].expand_as(distance)
    if causal:
        causally_visible = distance >= 0
        if prefix_lens is not None:
            # Within the prefix both tokens of a pair lie before its end.
            last = torch.maximum(query_positions[:, :, None], key_positions)
            causally_visible = causally_visible | (last < prefix_lens[:, None, None])
        visible = visible & causally_visible
    if window_tokens is not None:
        visible = visible & ((distance.abs() if looks_ahead else distance) < window_tokens)
    bias = None
    if alibi_slopes is not None:
        bias = -alibi_slopes.to(wide)[:, None, None] * distance[:, None].abs()
    queries = padded(query.to(wide), query_starts, max_query_tokens)
    out, lse = softmax_attention(queries, keys, values, visible, scale, softcap, bias, sinks)
    out, lse = (unpadded(rows, query_starts, query.shape[0]) for rows in (out, lse))
    return out.to(query.dtype), lse


def softmax_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the softmax-weighted values, and the log-sum-exp (logarithm of the denominator).

    Args:
        queries: ``[B, Q, N, D]``, float32 or wider.
        keys: ``[B, L, K, D]``, dtype of ``queries``; head n reads kv head n // G.
        values: ``[B, L, K, E]``, dtype of ``queries``, finite also where masked.
        visible: ``[B, Q, L]`` bool, the keys that a query sees.
        bias: ``[B, N, Q, L]`` or None; added to the capped scores.
        sinks: ``[N]`` or None; one extra score per head that joins the softmax without a value.
    Returns: ``[B, Q, N, E]``, zeros for queries without a visible key; ``[B, Q, N]``, -inf without
        visible key and sink.
    """
    num_kv_heads = keys.shape[2]
    grouped = queries.unflatten(2, (num_kv_heads, -1))  # [B, Q, K, G, D]
    scores = torch.einsum("bqkgd,blkd->bkgql", grouped, keys).flatten(1, 2) * scale  # [B, N, Q, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    # The sink is one more key in the last column; -inf stands for no sink.
    sink = scores.new_full((scores.shape[1],), -torch.inf) if sinks is None else sinks
    column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat((scores, column), -1)

    largest = scores.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1)  # [B, N, Q]; 0 without a visible key, else at least 1
    grouped_weights = weights[..., :-1].unflatten(1, (num_kv_heads, -1))
    mixed = torch.einsum("bkgql,blke->bqkge", grouped_weights, values)
    mixed = mixed.flatten(2, 3)  # [B, Q, N, E]
    logarithm = (largest[..., 0] + total.log()).transpose(1, 2)
    return mixed / total.clamp(min=1).transpose(1, 2)[..., None], logarithm


def padded(rows: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Pad the rows of each sequence with zeros to ``[B, longest, ...]``.

    Args:
        rows: ``[T, ...]``.
        starts: ``[B + 1]`` int64; sequence b has the rows starts[b] to starts[b + 1] (exclusive).
    """
    indices = starts[:-1, None] + torch.arange(longest, device=rows.device)
    # Row T of the extended tensor is zero; indices after a sequence's end point to that row.
    with_zero_row = functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, 1))
    return with_zero_row[torch.where(indices < starts[1:, None], indices, rows.shape[0])]


def unpadded(sequences: Tensor, starts: Tensor, num_tokens: int) -> Tensor:
    """Undo ``padded``: return ``[T, ...]`` from ``[B, longest, ...]``."""
    sequence, offset = positions_of(starts, num_tokens)
    return sequences[sequence, offset]


def positions_of(starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return each token's sequence and its offset within the sequence, each ``[T]`` int64."""
    tokens = torch.arange(num_tokens, device=starts.device)
    sequence = torch.bucketize(tokens, starts[1:], right=True)
    sequence = sequence.clamp(max=max(starts.shape[0] - 2, 0))
    return sequence, tokens - starts[sequence]


def cached(
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    wide: torch.dtype,
    scale: Tensor | None = None,
) -> Tensor:
    """Read each sequence's tokens from the cache, ``[B, M S, ...]`` of dtype ``wide``.

    Slots beyond a sequence's length may hold anything and are returned as zeros.

    Args:
        cache: ``[P, S, ...]``.
        page_table: ``[B, M]`` int64.
        seq_lens: ``[B]`` int64.
        scale: ``[1]`` or ``[K]``, factor of all stored numbers or of each head's.
    """
    stored = cache[page_table].flatten(1, 2).to(wide)
    is_written = torch.arange(stored.shape[1], device=stored.device) < seq_lens[:, None]
    is_written = is_written.view(*is_written.shape, *(1 for _ in stored.shape[2:]))
    # Unwritten slots may hold NaN, which a masked score would not remove from the sum of values.
    stored = torch.where(is_written, stored, 0)
    return stored if scale is None else stored * scale.to(wide)[:, None]
