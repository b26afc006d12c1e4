# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Attention over a paged cache, in Triton.

Sequences with several queries: each program takes a tile of (query, head) pairs of one kv head, and
loops over the keys that at least one of them sees. Sequences with one query: each program takes one
kv head and a part of the keys (split-KV), and ``_join_parts`` joins the parts.

The route, the partition of the keys and the order of summation depend only on the sequence itself,
never on the rest of the batch. A token's result may still differ in the last bits between being the
only query of its sequence and being one of several, since these take different routes.

Dimensions: T tokens, N heads, K kv heads, G = N / K, D head size, B sequences, M pages of the
longest sequence, P pages, S page size, C largest number of parts.
Source: arXiv:2205.14135 (tiles); the two routes are those of arXiv:2307.08691 and of its authors'
    Flash-Decoding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT64,
    Build,
    dtype_name,
    given,
)
from interposer_ops._triton.declare import triton_kernel
from interposer_ops.attention._attention_tiles_triton import (
    LOG2E,
    keys_of_all,
    keys_of_any,
    normalise,
)
from interposer_ops.attention._paged_decode_triton import attend_keys, mix_parts, paged_tile
from interposer_ops.caches._kv_cache_triton import stored_as


@triton_kernel("paged_attention", judge="judge_fp8", batch_invariant=False)
def paged_attention_triton(
    query: Tensor, key_cache: Tensor, value_cache: Tensor,
    page_table: Tensor, query_starts: Tensor, seq_lens: Tensor,
    max_query_tokens: int, scale: float, causal: bool, window_tokens: int | None,
    softcap: float | None, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, prefix_lens: Tensor | None = None,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``paged_attention``; sequences with one query use split-KV decode."""
    num_tokens, num_heads, head_size = query.shape
    page_size, num_kv_heads = key_cache.shape[1:3]
    out = query.new_empty(query.shape)
    if num_tokens == 0:
        return out
    if window_tokens is not None:
        # No sequence is longer than its pages; position + window then fits a 32-bit integer.
        window_tokens = min(window_tokens, page_table.shape[1] * page_size)
    batch = query_starts, seq_lens, prefix_lens
    cache = key_cache, value_cache, page_table
    masks = alibi_slopes, key_scale, scale, softcap, window_tokens
    strides = query.stride(0), key_cache.stride(0), value_cache.stride(0), page_table.stride(0)
    sizes = {
        "CAUSAL": causal,
        "SCALES": 1 if key_scale is None else key_scale.shape[0],
        "PAGE_SIZE": page_size,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_SIZE": head_size,
    }
    if max_query_tokens > 1:
        tile = paged_tile("paged_attention", query.device, head_size, query.element_size())
        tiles = triton.cdiv(max_query_tokens * sizes["GROUP"], tile.rows)
        _mix_tile[(tiles, num_kv_heads, seq_lens.shape[0])](
            query, *cache, *batch, *masks, *strides, out, sinks, value_scale,
            **sizes, VALUE_SCALES=1 if value_scale is None else value_scale.shape[0],
            ROWS=tile.rows, **tile.options,
        )  # fmt: skip
    # A batch with longer queries may also contain sequences with one query.
    mix_parts(query, cache, batch, masks, strides, sizes, out, sinks, value_scale)
    return out


@triton.jit
def _mix_tile(
    query, key_cache, value_cache, page_table, query_starts, seq_lens, prefix_lens, slopes,
    key_scale, scale, softcap, window, query_stride, key_stride, value_stride, table_stride, out,
    sinks, value_scale,
    CAUSAL: tl.constexpr, SCALES: tl.constexpr, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, VALUE_SCALES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(2)
    kv_head = tl.program_id(1)
    begin = tl.load(query_starts + sequence)
    num_queries = (tl.load(query_starts + sequence + 1) - begin).to(tl.int32)
    first_row = tl.program_id(0) * ROWS
    if num_queries < 2 or first_row >= num_queries * GROUP:
        return
    num_keys = tl.load(seq_lens + sequence).to(tl.int32)
    context = num_keys - num_queries
    prefix = None if prefix_lens is None else tl.load(prefix_lens + sequence).to(tl.int32)

    row = first_row + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_mask = token < num_queries
    element = tl.arange(0, COLUMNS)[None, :]
    element_mask = row_mask[:, None] & (element < HEAD_SIZE)
    rows = (begin + token)[:, None]
    row_offsets = head[:, None] * HEAD_SIZE + element
    q = tl.load(query + rows * query_stride + row_offsets, mask=element_mask, other=0.0)
    positions = (context + token)[:, None]
    slope = None if slopes is None else tl.load(slopes + head, mask=row_mask, other=0.0)[:, None]
    if key_scale is not None:
        scale = scale * tl.load(key_scale + kv_head % SCALES)
    total = tl.zeros([ROWS], tl.float32)
    largest = total - float("inf")
    if sinks is not None:
        largest = tl.load(sinks + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)

    first = context + first_row // GROUP
    last = context + tl.minimum((first_row + ROWS - 1) // GROUP, num_queries - 1)
    start, end = keys_of_any(first, last, num_keys, window, prefix, CAUSAL, False)
    # Tiles begin at multiples of KEYS, so that the order of summation does not depend on the
    # position of a query within the tile of rows.
    start = start // KEYS * KEYS
    keys = key_cache + kv_head * HEAD_SIZE
    values = value_cache + kv_head * HEAD_SIZE
    pages = page_table + sequence.to(tl.int64) * table_stride
    if window is None:
        # A first loop without masks covers the keys that all queries see. With a window these are
        # few, and a second loop would only enlarge the kernel.
        _, unmasked_end = keys_of_all(first, last, num_keys, window, prefix, CAUSAL, False)
        unmasked_end = unmasked_end // KEYS * KEYS
        largest, total, mixed = attend_keys(
            start, unmasked_end, q, positions, largest, total, mixed, keys, values, pages, num_keys,
            prefix, slope, scale, softcap, window, key_stride, value_stride,
            CAUSAL, False, PAGE_SIZE, NUM_KV_HEADS, HEAD_SIZE, KEYS, COLUMNS,
        )  # fmt: skip
        start = unmasked_end
    largest, total, mixed = attend_keys(
        start, end, q, positions, largest, total, mixed, keys, values, pages, num_keys,
        prefix, slope, scale, softcap, window, key_stride, value_stride,
        CAUSAL, True, PAGE_SIZE, NUM_KV_HEADS, HEAD_SIZE, KEYS, COLUMNS,
    )  # fmt: skip
    result = normalise(mixed, total)
    if value_scale is not None:
        result *= tl.load(value_scale + kv_head % VALUE_SCALES)
    target = out + rows * (NUM_KV_HEADS * GROUP * HEAD_SIZE) + row_offsets
    tl.store(target, result.to(out.dtype.element_ty), mask=element_mask)


def _build(
    label: str,
    heads: tuple[int, int, int],
    *features: str,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    longest: int = 1024,
    window_tokens: int | None = None,
    softcap: float | None = None,
) -> Build:
    """Describe an ahead-of-time build for 4 sequences of up to ``longest`` tokens in pages of 16.

    Args:
        heads: heads, kv heads, head size.
        features: names of the optional arguments that are not None.
    """
    num_heads, kv_heads, head_size = heads
    cache, scale = (cache_dtype or dtype, 4096, 16, kv_heads, head_size), (FP32, 1)
    options: dict[str, Any] = {
        "sinks": (dtype, num_heads),
        "alibi_slopes": (FP32, num_heads),
        "prefix_lens": (INT64, 4),
        "key_scale": scale,
        "value_scale": scale,
    }
    arguments = given(
        *((dtype, 4 * longest, num_heads, head_size), cache, cache),
        *((INT64, 4, 1024), (INT64, 5), (INT64, 4), longest),
        *(head_size**-0.5, True, window_tokens, softcap),
        *(value if name in features else None for name, value in options.items()),
    )
    cache_facts = {} if cache_dtype is None else stored_as(cache_dtype)
    name, matrix = dtype_name(dtype), dtype is not FP32
    return Build("paged_attention_triton", label, arguments, name, matrix=matrix, **cache_facts)


_LLAMA = (32, 8, 128)
_SCALES = ("key_scale", "value_scale")

BUILDS = (
    _build("32 and 8 heads of 128", _LLAMA),
    _build("32 and 8 heads of 128, decode", _LLAMA, longest=1),
    _build("8 and 4 heads of 256, window, softcap", (8, 4, 256), window_tokens=4096, softcap=50.0),
    _build(
        "64 and 8 heads of 64, window, softcap, sinks",
        (64, 8, 64),
        "sinks",
        window_tokens=128,
        softcap=30.0,
    ),
    _build(
        "float16, 32 and 8 heads of 80, alibi, prefix",
        (32, 8, 80),
        *("alibi_slopes", "prefix_lens"),
        dtype=FP16,
    ),
    _build("float32, 16 and 16 heads of 64", (16, 16, 64), dtype=FP32),
    _build("float8_e4m3fn, 32 and 8 heads of 128", _LLAMA, *_SCALES, cache_dtype=E4M3),
    _build("float8_e5m2, 32 and 8 heads of 128", _LLAMA, *_SCALES, cache_dtype=E5M2),
)
