# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Attention to latent vectors of a paged cache, in Triton: split contexts, merged at the end.

A split has a fixed length: the result of a row depends on the context of the row alone. The heads
of one token are the rows of a tile: all heads read the same vectors.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size, X attended tokens, Z splits of the longest context.
Source: arXiv:2405.04434 (the attention); arXiv:2311.01282 (splits of a context).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, E4M3, E5M2, FP16, FP32, INT32, INT64, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops._triton.rows import row_tile
from interposer_ops.attention._attention_tiles_triton import (
    LOG2E,
    MIN_TILE_SIDE,
    accumulate_tile,
    context_of,
    normalise,
    sequence_of,
)
from interposer_ops.caches._kv_cache_triton import stored_as

_MAX_PROGRAMS = 65535  # along the last axis of a grid


@triton_kernel("latent_attention_decode", judge="judge_fp8")
def latent_attention_decode_triton(
    query: Tensor, cache: Tensor, page_table: Tensor, query_starts: Tensor,
    seq_lens: Tensor, max_query_tokens: int, latent_size: int, scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``latent_attention_decode``; the page table's width gives the number of splits.

    No length is read back to the host: programs of splits after the end of a context return at
    once.
    """
    longest = page_table.shape[1] * cache.shape[1]
    token_lists = query_starts, seq_lens, None, None
    return _attend_in_splits(
        query, cache, page_table, token_lists, longest, latent_size, scale, cache_scale
    )


@triton_kernel("sparse_latent_attention", judge="judge_fp8")
def sparse_latent_attention_triton(
    query: Tensor, cache: Tensor, page_table: Tensor, sequences: Tensor,
    indices: Tensor, latent_size: int, scale: float, cache_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``sparse_latent_attention``, splitting each token's list of positions."""
    token_lists = None, None, sequences, indices
    longest = indices.shape[1]
    return _attend_in_splits(
        query, cache, page_table, token_lists, longest, latent_size, scale, cache_scale
    )


_TokenLists = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""query_starts and seq_lens (dense), or sequences and indices (sparse); the others are None."""


class _Tile(NamedTuple):
    """Heads, tokens and elements per program and loop iteration, and compiler options.

    If ``front`` covers the latent vector, ``front`` and ``tail`` (the rotary part) are loaded once
    and serve as keys and as values. Otherwise a vector is read in steps of ``front`` for the
    scores, then ``values`` of its elements again; other programs take the other elements.
    """

    heads: int
    tokens: int
    front: int
    tail: int
    values: int
    split: int
    compiled: Mapping[str, int]


@per_device
def _tile(kernel: str, device: torch.device, num_heads: int, latent_size: int, width: int) -> _Tile:
    """Choose the tile from the sizes of heads and vectors alone.

    Tuned block parameters: ``heads`` and ``tokens``, the largest tile; ``least_heads``, rows that a
    tile has even for fewer heads; ``front`` and ``values``, the most elements, see ``_Tile``;
    ``split``, the tokens of a split; ``scratch``, see ``_attend_in_splits``.
    """
    parameters = parameters_for(kernel, device)
    blocks = parameters.blocks
    heads = max(MIN_TILE_SIDE, blocks["least_heads"], triton.next_power_of_2(num_heads))
    latent_columns = max(MIN_TILE_SIDE, triton.next_power_of_2(latent_size))
    front, values = (min(blocks[name], latent_columns) for name in ("front", "values"))
    tail = 0
    if front == values == latent_columns:
        if width > latent_size:
            tail = max(MIN_TILE_SIDE, triton.next_power_of_2(width - latent_size))
    else:
        front = min(blocks["front"], max(MIN_TILE_SIDE, triton.next_power_of_2(width)))
    sizes = min(heads, blocks["heads"]), blocks["tokens"], front, tail, values
    return _Tile(*sizes, blocks["split"], parameters.compiled)


def _tuning(dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """Return the name of the tuning entry; a narrower cache dtype needs more registers."""
    if dtype == torch.float32:
        return "latent_attention_float32"
    return "latent_attention" if cache_dtype == dtype else "latent_attention_narrow"


def _attend_in_splits(
    query: Tensor, cache: Tensor, page_table: Tensor, token_lists: _TokenLists,
    longest: int, latent_size: int, scale: float, cache_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute attention over contexts, or position lists, of up to ``longest`` tokens.

    The block parameter ``scratch`` bounds the float32 accumulators of all splits; if all tokens
    need more, tokens are processed in batches.
    """
    num_tokens, num_heads, width = query.shape
    query_starts, seq_lens, sequences, indices = token_lists
    out = torch.empty((num_tokens, num_heads, latent_size), dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    kernel = _tuning(query.dtype, cache.dtype)
    tile = _tile(kernel, query.device, num_heads, latent_size, width)
    merge = row_tile("latent_attention_merge", query.device, latent_size)
    num_splits = max(1, -(-longest // tile.split))
    scratch = parameters_for(kernel, query.device).blocks["scratch"]
    tokens_per_launch = scratch // (num_splits * num_heads * latent_size)
    tokens_per_launch = min(num_tokens, _MAX_PROGRAMS, max(1, tokens_per_launch))
    shape = tokens_per_launch, num_splits, num_heads
    mixed = torch.empty((*shape, latent_size), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, *shape), dtype=torch.float32, device=query.device)

    head_blocks = -(-num_heads // tile.heads)
    value_blocks = -(-latent_size // tile.values)
    for first in range(0, num_tokens, tokens_per_launch):
        count = min(tokens_per_launch, num_tokens - first)
        _attend[(value_blocks * head_blocks, num_splits, count)](
            query, cache, page_table, query_starts, seq_lens, sequences, indices, cache_scale,
            mixed, sums[0], sums[1], scale, first, longest, page_table.shape[0], query.stride(0),
            cache.stride(0), page_table.stride(0), 0 if indices is None else indices.stride(0),
            NUM_HEADS=num_heads, LATENT_SIZE=latent_size, WIDTH=width, PAGE_SIZE=cache.shape[1],
            HEADS=tile.heads, TOKENS=tile.tokens, FRONT=tile.front, REST=tile.tail,
            VALUES=tile.values, SPLIT=tile.split, **tile.compiled,
        )  # fmt: skip
        _merge[(merge.column_blocks(latent_size), merge.row_blocks(num_heads), count)](
            mixed, sums[0], sums[1], query_starts, seq_lens, cache_scale, out, first, longest,
            page_table.shape[0], num_splits,
            NUM_HEADS=num_heads, LATENT_SIZE=latent_size, SPLIT=tile.split, **merge.options,
        )  # fmt: skip
    return out


@triton.jit
def _attend(
    query, cache, page_table, query_starts, seq_lens, sequences, indices, cache_scale, mixed,
    largest, total, scale, first_token, longest, num_sequences, query_stride, page_stride,
    table_stride, indices_stride,
    NUM_HEADS: tl.constexpr, LATENT_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, FRONT: tl.constexpr,
    REST: tl.constexpr, VALUES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs read the same vectors, which then are in the cache.
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    WHOLE: tl.constexpr = FRONT >= LATENT_SIZE and VALUES >= LATENT_SIZE
    head = tl.program_id(0) % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    first_value = tl.program_id(0) // HEAD_BLOCKS * VALUES
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)  # of the scratch
    token = first_token + row
    # Sparse: the token's list of positions takes the place of the context.
    if indices is not None:
        sequence = tl.load(sequences + token).to(tl.int32)
        num_visible = longest
        indices += token * indices_stride
    else:
        sequence = sequence_of(token, query_starts, num_sequences)
        num_visible = context_of(token, sequence, query_starts, seq_lens)
    if split * SPLIT >= num_visible:
        return

    pages = page_table + sequence.to(tl.int64) * table_stride
    queries = query + token * query_stride
    head_mask = head < NUM_HEADS
    factor = scale * LOG2E
    if cache_scale is not None:
        factor *= tl.load(cache_scale)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    weights = tl.zeros([HEADS], tl.float32)
    values = tl.zeros([HEADS, VALUES], tl.float32)
    # The query is loaded once before the loop if one load covers a latent vector.
    if WHOLE:
        q = _rows(queries, head * WIDTH, head_mask, 0, LATENT_SIZE, FRONT, query)
        if REST > 0:
            q_rest = _rows(queries, head * WIDTH, head_mask, LATENT_SIZE, WIDTH, REST, query)
    for start in range(split * SPLIT, tl.minimum(num_visible, (split + 1) * SPLIT), TOKENS):
        position = start + tl.arange(0, TOKENS)
        key_mask = position < num_visible
        if indices is not None:
            position = tl.load(indices + position, mask=key_mask, other=-1)
            key_mask = position >= 0
            position = tl.where(key_mask, position, 0)
        page = tl.load(pages + position // PAGE_SIZE, mask=key_mask, other=0)
        row_offset = page * page_stride + position % PAGE_SIZE * WIDTH
        if WHOLE:
            v = _rows(cache, row_offset, key_mask, 0, LATENT_SIZE, FRONT, query)
            raw_scores = tl.dot(q, tl.trans(v), input_precision="ieee")
            if REST > 0:
                k = _rows(cache, row_offset, key_mask, LATENT_SIZE, WIDTH, REST, query)
                raw_scores = tl.dot(q_rest, tl.trans(k), raw_scores, input_precision="ieee")
        else:
            raw_scores = tl.zeros([HEADS, TOKENS], tl.float32)
            for step in range(0, WIDTH, FRONT):
                q = _rows(queries, head * WIDTH, head_mask, step, WIDTH, FRONT, query)
                k = _rows(cache, row_offset, key_mask, step, WIDTH, FRONT, query)
                raw_scores = tl.dot(q, tl.trans(k), raw_scores, input_precision="ieee")
            v = _rows(cache, row_offset, key_mask, first_value, LATENT_SIZE, VALUES, query)
        scores = tl.where(key_mask[None, :], raw_scores * factor, float("-inf"))
        highest, weights, values = accumulate_tile(scores, v, highest, weights, values)

    split_offset = (row * tl.num_programs(1) + split) * NUM_HEADS + head
    # All programs of a head compute the same maximum and sum; one of them stores both.
    if first_value == 0:
        tl.store(largest + split_offset, highest, mask=head_mask)
        tl.store(total + split_offset, weights, mask=head_mask)
    column = first_value + tl.arange(0, VALUES)[None, :]
    target = mixed + split_offset[:, None] * LATENT_SIZE + column
    tl.store(target, values, mask=head_mask[:, None] & (column < LATENT_SIZE))


@triton.jit
def _rows(pointer, row, row_mask, start, end, COLUMNS: tl.constexpr, like):
    """Load elements ``start`` to ``end`` of rows, zeros elsewhere, in the dtype of ``like``."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    element_mask = row_mask[:, None] & (column < end)
    tile = tl.load(pointer + row[:, None] + column, mask=element_mask, other=0.0)
    return tile.to(like.dtype.element_ty)  # exact: a cache is as narrow as the query, or narrower


@triton.jit
def _merge(
    mixed, largest, total, query_starts, seq_lens, cache_scale, out, first_token, longest,
    num_sequences, num_splits,
    NUM_HEADS: tl.constexpr, LATENT_SIZE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the partial attention results of a token's splits, in ascending order."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(2).to(tl.int64)
    token = first_token + row
    if query_starts is None:
        num_visible = longest
    else:
        sequence = sequence_of(token, query_starts, num_sequences)
        num_visible = context_of(token, sequence, query_starts, seq_lens)
    head_mask = head < NUM_HEADS
    element_mask = head_mask[:, None] & (column < LATENT_SIZE)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, COLUMNS], tl.float32)
    for split in range(0, tl.cdiv(num_visible, SPLIT)):
        split_offset = (row * num_splits + split) * NUM_HEADS + head
        split_highest = tl.load(largest + split_offset, mask=head_mask, other=float("-inf"))
        higher = tl.maximum(highest, split_highest)
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(highest - origin)
        split_weight = tl.exp2(split_highest - origin)
        weights = (
            weights * decay
            + tl.load(total + split_offset, mask=head_mask, other=0.0) * split_weight
        )
        part = tl.load(
            mixed + split_offset[:, None] * LATENT_SIZE + column, mask=element_mask, other=0.0
        )
        values = values * decay[:, None] + part * split_weight[:, None]
        highest = higher
    # Values are stored without the cache's scale, which is linear and so applied once at the end.
    result = normalise(values, weights)
    if cache_scale is not None:
        result *= tl.load(cache_scale)
    target = out + (token * NUM_HEADS + head)[:, None] * LATENT_SIZE + column
    tl.store(target, result.to(out.dtype.element_ty), mask=element_mask)


_SIZES = 512, (128 + 64) ** -0.5  # latent size and factor of the scores of DeepSeek-V3


def _decode_arguments(
    dtype: torch.dtype, heads: int, stored: torch.dtype, scale: Any
) -> Callable[..., Any]:
    query, cache = (dtype, 32, heads, 576), (stored, 4096, 64, 576)
    return given(query, cache, (INT64, 32, 128), (INT64, 33), (INT64, 32), 1, *_SIZES, scale)


def _sparse_arguments(
    dtype: torch.dtype, heads: int, stored: torch.dtype, scale: Any
) -> Callable[..., Any]:
    query, cache = (dtype, 32, heads, 576), (stored, 4096, 64, 576)
    return given(query, cache, (INT64, 32, 128), (INT64, 32), (INT32, 32, 2048), *_SIZES, scale)


def _builds(kernel: str, make: Callable[..., Callable[..., Any]]) -> tuple[Build, ...]:
    """List the ahead-of-time builds: all heads of DeepSeek-V3, and the heads of one rank."""
    e4m3, e5m2 = make(BF16, 128, E4M3, (FP32, 1)), make(BF16, 16, E5M2, (FP32, 1))
    return (
        Build(kernel, "bfloat16, 128 heads", make(BF16, 128, BF16, None), matrix=True),
        Build(kernel, "bfloat16, 16 heads", make(BF16, 16, BF16, None), matrix=True),
        Build(kernel, "float16, 16 heads", make(FP16, 16, FP16, None), "float16", matrix=True),
        Build(kernel, "float32, 16 heads", make(FP32, 16, FP32, None), "float32"),
        Build(kernel, "float8_e4m3fn cache, 128 heads", e4m3, matrix=True, **stored_as(E4M3)),
        Build(kernel, "float8_e5m2 cache, 16 heads", e5m2, matrix=True, **stored_as(E5M2)),
    )


BUILDS = (
    *_builds("latent_attention_decode_triton", _decode_arguments),
    *_builds("sparse_latent_attention_triton", _sparse_arguments),
)
