"""Ragged attention without a cache, and latent attention (MLA), by the compiled library.

Dimensions: T query tokens, U key tokens, N heads, K kv heads, D size of a query and key, E size of
a value, B sequences, C latent size, R rotary size, P pages, S page size, M pages of the longest
sequence.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from interposer import Request, Verdict
from interposer_cpu import native
from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import CACHE_TYPES, TYPES, float64_bits


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
    """Compute the op ``ragged_attention``: attention over concatenated sequences."""
    return _ragged(
        query, key, value, query_starts, key_starts, scale, causal, window_tokens, softcap, sinks,
        alibi_slopes, None,
    )  # fmt: skip


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
    """Compute the op ``ragged_attention_with_lse``: attention and log-sum-exp of the scores."""
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    out = _ragged(
        query, key, value, query_starts, key_starts, scale, causal, window_tokens, softcap, sinks,
        alibi_slopes, lse,
    )  # fmt: skip
    return out, lse


def _ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    num_heads, head_size = query.shape[1:]
    num_kv_heads, value_size = value.shape[1:]
    query, key, value = _with_rows(query), _with_rows(key), _with_rows(value)
    query_starts, key_starts = query_starts.contiguous(), key_starts.contiguous()
    # Converted here: the library reads sinks as float32, whatever the query's dtype.
    sinks = None if sinks is None else sinks.float().contiguous()
    slopes = None if slopes is None else slopes.contiguous()
    out = query.new_empty(query.shape[0], num_heads, value_size)
    if is_compiling():
        # The op's schema has no optional tensors: an empty one stands for None.
        absent = query.new_empty(0, dtype=torch.float32)
        torch.ops.interposer_cpu.ragged_attention_out(
            out,
            absent if lse is None else lse,
            query,
            key,
            value,
            query_starts,
            key_starts,
            absent if sinks is None else sinks,
            absent if slopes is None else slopes,
            scale,
            softcap or 0.0,
            window_tokens or 0,
            causal,
        )
        return out
    native.library().ragged_attention(
        TYPES[query.dtype],
        num_heads,
        num_kv_heads,
        head_size,
        value_size,
        float64_bits(scale),
        # 0 stands for no softcap and for no window.
        float64_bits(softcap or 0.0),
        window_tokens or 0,
        causal,
        query_starts.shape[0] - 1,
        query_starts.data_ptr(),
        key_starts.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        query.stride(0),
        key.stride(0),
        value.stride(0),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if slopes is None else slopes.data_ptr(),
    )
    return out


def judge_latent(request: Request) -> Verdict:
    """Accept latent caches in the dtype of the query or in 8-bit floats."""
    cache_dtype = str(request.dims.get("cache_dtype", request.dtype))
    if cache_dtype not in (request.dtype, "float8_e4m3fn", "float8_e5m2"):
        return Verdict.refuse(f"reads caches of {request.dtype} or 8-bit floats, got {cache_dtype}")
    return native.judge(request)


@fused("latent_attention_decode")
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
    """Compute the op ``latent_attention_decode``: all heads in one pass over the cache."""
    num_tokens, num_heads, width = query.shape
    query = _with_rows(query)
    if cache.stride(-1) != 1:
        cache = cache.contiguous()
    if page_table.stride(-1) != 1:
        page_table = page_table.contiguous()
    query_starts, seq_lens = query_starts.contiguous(), seq_lens.contiguous()
    out = query.new_empty(num_tokens, num_heads, latent_size)
    cache_type = CACHE_TYPES[cache.dtype]
    if is_compiling():
        absent = query.new_empty(0, dtype=torch.float32)
        torch.ops.interposer_cpu.latent_attention_out(
            out,
            query,
            cache,
            page_table,
            query_starts,
            seq_lens,
            absent if cache_scale is None else cache_scale,
            cache_type,
            scale,
        )
        return out
    native.library().latent_attention(
        TYPES[query.dtype],
        cache_type,
        num_heads,
        width,
        latent_size,
        cache.shape[1],
        float64_bits(scale),
        seq_lens.shape[0],
        query_starts.data_ptr(),
        seq_lens.data_ptr(),
        page_table.data_ptr(),
        page_table.stride(0),
        query.data_ptr(),
        cache.data_ptr(),
        query.stride(0),
        cache.stride(0),
        cache.stride(1),
        out.data_ptr(),
        0 if cache_scale is None else cache_scale.data_ptr(),
    )
    return out


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with adjacent heads in every token; copy only if necessary."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
