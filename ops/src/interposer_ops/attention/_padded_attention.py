"""Attention between sequences that are padded to one length: the definition that ops share.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, E size of a value, B sequences,
Q longest query, L keys of a padded sequence, P pages, S page size, M pages of the longest sequence.
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
    """Return attention of each sequence's queries to its keys, and its lse.

    The last query of a sequence stands where its last key does, whatever their numbers.

    Args:
        query: ``[T, N, D]``, any float dtype.
        keys: ``[B, L, K, D]``, float32 or wider.
        values: ``[B, L, K, E]``, dtype of ``keys``, finite.
        query_starts: ``[B + 1]`` int64, ascending, the last is T.
        key_lens: ``[B]`` int64.
        max_query_tokens: Q.
        looks_ahead: a window reaches as far ahead as behind.
    Returns: ``[T, N, E]``, dtype of ``query``; ``[T, N]``, dtype of ``keys``.
    """
    wide = keys.dtype
    key_positions = torch.arange(keys.shape[1], device=query.device)  # [L]
    offsets = torch.arange(max_query_tokens, device=query.device)  # [Q]
    query_positions = (key_lens - query_starts.diff())[:, None] + offsets  # [B, Q]
    distance = query_positions[:, :, None] - key_positions  # [B, Q, L]
    visible = (key_positions < key_lens[:, None])[:, None].expand_as(distance)
    if causal:
        reached = distance >= 0
        if prefix_lens is not None:
            last = torch.maximum(query_positions[:, :, None], key_positions)
            reached = reached | (last < prefix_lens[:, None, None])
        visible = visible & reached
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
    """Return the weighted values, and the lse: the logarithm of what the softmax divides by.

    Args:
        queries: ``[B, Q, N, D]``, float32 or wider.
        keys: ``[B, L, K, D]``, dtype of ``queries``; head n reads kv head n // G.
        values: ``[B, L, K, E]``, dtype of ``queries``, finite where nobody sees them.
        visible: ``[B, Q, L]`` bool, which keys a query sees.
        bias: ``[B, N, Q, L]`` or None; added to the capped scores.
        sinks: ``[N]`` or None; a score per head that takes part in the softmax without a value.
    Returns: ``[B, Q, N, E]``, zeros where a query sees no key; ``[B, Q, N]``, -inf where neither a
        key is seen nor a sink is there.
    """
    num_kv_heads = keys.shape[2]
    grouped = queries.unflatten(2, (num_kv_heads, -1))  # [B, Q, K, G, D]
    scores = torch.einsum("bqkgd,blkd->bkgql", grouped, keys).flatten(1, 2) * scale  # [B, N, Q, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    sink = scores.new_full((scores.shape[1],), -torch.inf) if sinks is None else sinks
    column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat((scores, column), -1)

    largest = scores.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1)  # [B, N, Q]; at least 1 where anything is seen
    shared = weights[..., :-1].unflatten(1, (num_kv_heads, -1))
    mixed = torch.einsum("bkgql,blke->bqkge", shared, values).flatten(2, 3)  # [B, Q, N, E]
    logarithm = (largest[..., 0] + total.log()).transpose(1, 2)
    return mixed / total.clamp(min=1).transpose(1, 2)[..., None], logarithm


def padded(rows: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Return the rows of each sequence, ``[B, longest, ...]``, with zeros after its end.

    Args:
        rows: ``[T, ...]``.
        starts: ``[B + 1]`` int64; sequence b goes from entry b to before entry b + 1.
    """
    places = starts[:-1, None] + torch.arange(longest, device=rows.device)
    zero = functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, 1))
    return zero[torch.where(places < starts[1:, None], places, rows.shape[0])]


def unpadded(sequences: Tensor, starts: Tensor, num_tokens: int) -> Tensor:
    """Return the ``[T, ...]`` of which ``padded`` gave ``[B, longest, ...]``."""
    sequence, offset = positions_of(starts, num_tokens)
    return sequences[sequence, offset]


def positions_of(starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of every token and its offset in it, each ``[T]`` int64."""
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
    """Return what the cache holds of each sequence, ``[B, M S, ...]`` of dtype ``wide``.

    Slots beyond a sequence's length may hold anything; they give zeros.

    Args:
        cache: ``[P, S, ...]``.
        page_table: ``[B, M]`` int64.
        seq_lens: ``[B]`` int64.
        scale: ``[1]`` or ``[K]``, a factor of all stored numbers, or of those of each head.
    """
    held = cache[page_table].flatten(1, 2).to(wide)
    written = torch.arange(held.shape[1], device=held.device) < seq_lens[:, None]
    held = torch.where(written.view(*written.shape, *(1 for _ in held.shape[2:])), held, 0)
    return held if scale is None else held * scale.to(wide)[:, None]
