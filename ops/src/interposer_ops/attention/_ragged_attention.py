"""Attention without a cache: encoders, cross attention, prefill of models with latent attention.

Dimensions: T query tokens, U key tokens, N heads, K kv heads, D size of a query and key, E size of
a value, B sequences, Q longest query, L longest sequence of keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.attention._padded_attention import masked_attention, padded

_op = partial(standard_op, cases="interposer_ops.attention._ragged_attention_cases")
_attention = partial(
    _op,
    tolerance=Tolerance(roundings=6),
    ragged={"query": "query_starts", "key": "key_starts", "value": "key_starts"},
)


@_attention("ragged_attention")
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query_tokens: int,
    max_key_tokens: int,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Attend from the queries of each sequence to its keys, over concatenated sequences.

    out = softmax(cap(scale * q k^T) + bias + mask) v with cap(s) = softcap * tanh(s / softcap) and
    bias = -slope * |distance|, in float32 or wider. Head n reads kv head n // (N / K). The last
    query of a sequence has the position of the last key, whatever the numbers of both. A query
    without a visible key gives zeros. Tokens of query, key and value may be strided in memory.

    Args:
        query: ``[T, N, D]``, any float dtype.
        key: ``[U, K, D]``, dtype of ``query``.
        value: ``[U, K, E]``, dtype of ``query``.
        query_starts: ``[B + 1]`` int64, ascending, the last is T.
        key_starts: ``[B + 1]`` int64, ascending, the last is U.
        max_query_tokens: Q, at least 1; no query is longer.
        max_key_tokens: L, at least 1; no sequence has more keys.
        scale, softcap, sinks, alibi_slopes: as in ``paged_attention``.
        causal: a query sees the key at its own position and earlier keys; False: all keys.
        window_tokens: a query sees keys at a distance below this, on both sides; None: no window.
    Returns: ``[T, N, E]``, dtype of ``query``.
    Dims: num_heads, num_kv_heads, head_size, value_size, causal, windowed, softcapped, sinks,
    alibi.
    Source: arXiv:1706.03762; arXiv:2305.13245 (GQA); arXiv:2405.04434 (values of another size);
        arXiv:2108.12409 (ALiBi); arXiv:2309.17453 (sinks).
    """
    masks = causal, window_tokens, softcap, sinks, alibi_slopes
    longest = max_query_tokens, max_key_tokens
    out, _ = _attend(query, key, value, query_starts, key_starts, *longest, scale, *masks)
    return out


@_attention("ragged_attention_with_lse")
def ragged_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query_tokens: int,
    max_key_tokens: int,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute ``ragged_attention`` and the log-sum-exp of each query's scores.

    lse = log(sum(exp(scores))) over the keys that a query sees, including the sink. With the lse,
    ``merge_attention_states`` joins attention over different keys.

    Args: those of ``ragged_attention``.
    Returns: ``[T, N, E]``, dtype of ``query``; ``[T, N]``, float32 or wider, -inf for queries
        without a visible key and without a sink.
    Dims: those of ``ragged_attention``.
    Source: arXiv:2501.01005.
    """
    masks = causal, window_tokens, softcap, sinks, alibi_slopes
    longest = max_query_tokens, max_key_tokens
    return _attend(query, key, value, query_starts, key_starts, *longest, scale, *masks)


@_op(
    "merge_attention_states",
    tolerance=Tolerance(roundings=2),
    batched=("out_a", "lse_a", "out_b", "lse_b"),
)
def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over all keys.

    lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b, in
    float32 or wider. A side without keys has an lse of -inf and contributes nothing; if both sides
    have none, the result is zero, with an lse of -inf. Tokens of every argument may be strided in
    memory.

    Args:
        out_a: ``[T, N, E]``, any float dtype, finite.
        lse_a: ``[T, N]``, float32 or wider, finite or -inf.
        out_b: ``[T, N, E]``, dtype of ``out_a``, finite.
        lse_b: ``[T, N]``, dtype of ``lse_a``, finite or -inf.
    Returns: ``[T, N, E]``, dtype of ``out_a``; ``[T, N]``, dtype of ``lse_a``.
    Dims: num_heads, value_size.
    Source: arXiv:2501.01005.
    """
    largest = torch.maximum(lse_a, lse_b)
    # -inf - -inf would be NaN for rows without keys on both sides.
    largest = torch.where(largest == -torch.inf, 0, largest)
    weight_a, weight_b = (torch.exp(lse - largest) for lse in (lse_a, lse_b))
    total = weight_a + weight_b  # 0 without keys, else at least 1
    wide = torch.promote_types(out_a.dtype, lse_a.dtype)
    mixed = weight_a[..., None] * out_a.to(wide) + weight_b[..., None] * out_b.to(wide)
    return (mixed / total.clamp(min=1)[..., None]).to(out_a.dtype), largest + total.log()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query_tokens: int,
    max_key_tokens: int,
    *masks: Any,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (padded(rows.to(wide), key_starts, max_key_tokens) for rows in (key, value))
    key_lens = key_starts.diff()
    return masked_attention(
        query, keys, values, query_starts, key_lens, max_query_tokens, *masks, looks_ahead=True
    )
