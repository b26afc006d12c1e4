"""A paged cache with 8 bits per element, floats or integers, with scales.

Dimensions: T tokens, K kv heads, D head size, B sequences, M pages of the longest sequence, P
pages, S page size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.caches._kv_cache import gathered_rows

_op = partial(standard_op, cases="interposer_ops.caches._quantized_cache_cases")
_WRITING: dict[str, Any] = {
    "batch_invariant": True,
    "mutates": ("key_cache", "value_cache"),
    "constants": ("key_scale", "value_scale"),
    "tolerance": Tolerance(roundings=0),
    "batched": ("key", "value", "slots"),
}
_READING: dict[str, Any] = {"constants": ("scale",), "tolerance": Tolerance(roundings=2)}


@_op("reshape_and_cache_fp8", **_WRITING)
def reshape_and_cache_fp8(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    cache_dtype: torch.dtype,
) -> None:
    """Store each token's key and value in its slot, divided by a scale and rounded to FP8.

    stored = round(clamp(x / scale, -largest, largest)), ties to even, where ``largest`` is the
    largest finite number of the cache's dtype.

    Args: those of ``reshape_and_cache``, but the caches are of ``cache_dtype``, float8_e4m3fn or
    float8_e5m2; scales ``[1]`` or ``[K]`` float32, positive.
    Dims: num_kv_heads, head_size, page_size, cache_dtype, per_head: one scale per kv head.
    Source: arXiv:2209.05433 (formats).
    """
    largest = torch.finfo(cache_dtype).max
    for x, scale, cache in ((key, key_scale, key_cache), (value, value_scale, value_cache)):
        quotient = x.to(scale.dtype) / scale[:, None]
        # Clamp first: torch's conversion saturates in e4m3, but gives infinity in e5m2.
        _store(quotient.clamp(-largest, largest).to(cache_dtype), cache, slots)


@_op("reshape_and_cache_int8", **_WRITING)
def reshape_and_cache_int8(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
) -> None:
    """Store each token's key and value in its slot, divided by a scale and rounded to int8.

    stored = clamp(round(x / scale), -128, 127), ties to even. There is no zero point.

    Infinities saturate; NaN becomes an arbitrary number.

    Args: those of ``reshape_and_cache``, but the caches are int8; scales ``[1]`` or ``[K]``
    float32, positive.
    Dims: num_kv_heads, head_size, page_size, per_head: one scale per kv head.
    """
    for x, scale, cache in ((key, key_scale, key_cache), (value, value_scale, value_cache)):
        quotient = x.to(scale.dtype) / scale[:, None]
        _store(quotient.round().clamp(-128, 127).to(torch.int8), cache, slots)


@_op("gather_cache_fp8", **_READING)
def gather_cache_fp8(
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    scale: Tensor,
    num_tokens: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Copy tokens out of an FP8 cache as ``gather_cache`` does, times a scale.

    Args: those of ``gather_cache``, but the cache is float8_e4m3fn or float8_e5m2; ``scale`` is
    ``[1]`` or ``[K]`` float32, ``out_dtype`` any float dtype.
    Returns: ``[T, K, D]``, ``out_dtype``.
    Dims: num_kv_heads, head_size, page_size, cache_dtype, per_head: one scale per kv head.
    """
    stored = gathered_rows(cache.to(scale.dtype), page_table, seq_lens, starts, num_tokens)
    return (stored * scale[:, None]).to(out_dtype)


@_op("gather_cache_int8", **_READING)
def gather_cache_int8(
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    scale: Tensor,
    num_tokens: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Copy tokens out of an int8 cache as ``gather_cache`` does, times a scale.

    Args: those of ``gather_cache``, but the cache is int8; ``scale`` is ``[1]`` or ``[K]`` float32,
    ``out_dtype`` any float dtype.
    Returns: ``[T, K, D]``, ``out_dtype``.
    Dims: num_kv_heads, head_size, page_size, per_head: one scale per kv head.
    """
    stored = gathered_rows(cache.to(scale.dtype), page_table, seq_lens, starts, num_tokens)
    return (stored * scale[:, None]).to(out_dtype)


def _store(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    page_size = cache.shape[1]
    cache[slots // page_size, slots % page_size] = rows.to(cache.dtype)
