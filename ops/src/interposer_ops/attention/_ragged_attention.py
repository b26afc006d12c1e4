"""Attention without a cache: encoders, cross attention, prefill of models with latent attention.

Dimensions: T query tokens, U key tokens, N heads, K kv heads, D size of a query and key, E size of
a value, B sequences, Q longest query, L longest sequence of keys.
"""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._dense_attention import attend, padded, unpadded

_CASES = "interposer_ops.attention._ragged_attention_cases"


@standard_op(
    "ragged_attention",
    cases=_CASES,
    tolerance=Tolerance(roundings=6),
    ragged={"query": "query_starts", "key": "key_starts", "value": "key_starts"},
)
def ragged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_query_tokens: int,
    max_key_tokens: int,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from the queries of each sequence to its keys; sequences lie one after the other.

    out = softmax(cap(scale * q k^T) + bias + mask) v with cap(s) = softcap * tanh(s / softcap) and
    bias = -slope * |distance|, in float32 or wider. Head n reads kv head n // (N / K). The last
    query of a sequence stands where its last key does, whatever their numbers. A query that sees
    no key gives zeros. Tokens of query, key and value may lie apart in memory.

    Args:
        query: ``[T, N, D]``, any float dtype.
        key: ``[U, K, D]``, dtype of ``query``.
        value: ``[U, K, E]``, dtype of ``query``.
        query_starts: ``[B + 1]`` int64, ascending, the last is T.
        key_starts: ``[B + 1]`` int64, ascending, the last is U.
        max_query_tokens: Q, at least 1; no query is longer.
        max_key_tokens: L, at least 1; no sequence has more keys.
        scale: factor of the scores.
        causal: a query sees the key where it stands and what is before it; False sees all.
        window_tokens: keys are seen that are less than this away, on either side; None sees all.
        softcap: bound of the scores; None leaves them.
        sinks: ``[N]``, any float dtype: scores that join each head's softmax and have no value.
        alibi_slopes: ``[N]`` float32, at least 0; what a token of distance costs a score.
    Returns: ``[T, N, E]``, dtype of ``query``.
    Dims: num_heads, num_kv_heads, head_size, value_size, causal, windowed, softcapped, sinks,
        alibi.
    Source: arXiv:1706.03762; arXiv:2305.13245 (GQA); arXiv:2405.04434 (values of another size);
        arXiv:2108.12409 (ALiBi); arXiv:2309.17453 (sinks).
    """
    masks = causal, window_tokens, softcap, sinks, alibi_slopes
    longest = max_query_tokens, max_key_tokens
    out, _ = _mixed(query, key, value, query_starts, key_starts, longest, scale, *masks)
    return out


@standard_op(
    "ragged_attention_with_lse",
    cases=_CASES,
    tolerance=Tolerance(roundings=6),
    ragged={"query": "query_starts", "key": "key_starts", "value": "key_starts"},
)
def ragged_attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_query_tokens: int,
    max_key_tokens: int,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``ragged_attention`` does, and the logarithm of each softmax's denominator.

    lse = log(sum(exp(scores))) over the keys that a query sees, the sink included: with it
    ``merge_attention_states`` joins attention to different keys.

    Args: those of ``ragged_attention``.
    Returns: ``[T, N, E]``, dtype of ``query``; ``[T, N]``, float32 or wider, -inf where a query
        sees no key and there is no sink.
    Dims: those of ``ragged_attention``.
    Source: arXiv:2501.01005.
    """
    masks = causal, window_tokens, softcap, sinks, alibi_slopes
    longest = max_query_tokens, max_key_tokens
    return _mixed(query, key, value, query_starts, key_starts, longest, scale, *masks)


def _mixed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    queries = padded(query.to(wide), query_starts, longest[0])  # [B, Q, N, D]
    keys, values = (padded(rows.to(wide), key_starts, longest[1]) for rows in (key, value))

    query_lens, key_lens = query_starts.diff(), key_starts.diff()  # [B]
    key_positions = torch.arange(longest[1], device=query.device)  # [L]
    offsets = torch.arange(longest[0], device=query.device)  # [Q]
    query_positions = (key_lens - query_lens)[:, None] + offsets  # [B, Q]
    distance = query_positions[:, :, None] - key_positions  # [B, Q, L]
    visible = (key_positions < key_lens[:, None])[:, None].expand_as(distance)
    if causal:
        visible = visible & (distance >= 0)
    if window_tokens is not None:
        visible = visible & (distance.abs() < window_tokens)
    bias = None
    if alibi_slopes is not None:
        bias = -alibi_slopes.to(wide)[:, None, None] * distance[:, None].abs()

    mixed, lse = attend(queries, keys, values, visible, scale, softcap, bias, sinks)
    out = unpadded(mixed, query_starts, query.shape[0])
    return out.to(query.dtype), unpadded(lse, query_starts, query.shape[0])
