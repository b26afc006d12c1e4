# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Indexer scores of sparse attention, in Triton.

T tokens, I indexer heads, D size of an indexer head, B sequences, P pages, S page size, L tokens of
the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, E4M3, FP32, INT64, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops.attention._attention_tiles_triton import MIN_TILE_SIDE, context_of, sequence_of
from interposer_ops.caches._kv_cache_triton import stored_as

_MAX_PROGRAMS = 65535  # along the second axis of a grid


@triton_kernel("indexer_scores", judge="judge_fp8")
def indexer_scores_triton(
    query: Tensor, keys: Tensor, weights: Tensor, page_table: Tensor,
    query_starts: Tensor, seq_lens: Tensor, max_seq_tokens: int,
    key_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``indexer_scores``; heads are rows of a tile, key scales are applied last."""
    num_tokens, num_heads, head_size = query.shape
    shape = num_tokens, max_seq_tokens
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    if scores.numel() == 0:
        return scores
    tile = _tile(query.device, query.dtype, num_heads, head_size)
    key_blocks = -(-max_seq_tokens // tile.keys)
    for first in range(0, num_tokens, _MAX_PROGRAMS):
        _score[(key_blocks, min(_MAX_PROGRAMS, num_tokens - first))](
            query, keys, weights, page_table, query_starts, seq_lens, key_scales, scores, first,
            max_seq_tokens, page_table.shape[0], query.stride(0), keys.stride(0), weights.stride(0),
            page_table.stride(0), 0 if key_scales is None else key_scales.stride(0),
            NUM_HEADS=num_heads, HEAD_SIZE=head_size, PAGE_SIZE=keys.shape[1], HEADS=tile.heads,
            KEYS=tile.keys, STEP=tile.step, **tile.compiled,
        )  # fmt: skip
    return scores


class _Tile(NamedTuple):
    """Heads and keys per program, which takes ``step`` elements of a head per iteration."""

    heads: int
    keys: int
    step: int
    compiled: Mapping[str, int]


@per_device
def _tile(device: torch.device, dtype: torch.dtype, num_heads: int, head_size: int) -> _Tile:
    """Choose the tile from the number and size of heads alone.

    Tuned block parameters: ``heads`` and ``keys``, the largest tile; ``step``, the most elements.
    """
    name = "indexer_scores_float32" if dtype == torch.float32 else "indexer_scores"
    parameters = parameters_for(name, device)
    blocks = parameters.blocks
    return _Tile(
        min(blocks["heads"], max(MIN_TILE_SIDE, triton.next_power_of_2(num_heads))),
        blocks["keys"],
        min(blocks["step"], max(MIN_TILE_SIDE, triton.next_power_of_2(head_size))),
        parameters.compiled,
    )


@triton.jit
def _score(
    query, keys, weights, page_table, query_starts, seq_lens, key_scales, scores, first_token,
    max_seq_tokens, num_sequences, query_stride, page_stride, weights_stride, table_stride,
    scales_stride,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    token = first_token + tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    target = scores + token * max_seq_tokens + position
    row_mask = position < max_seq_tokens
    sequence = sequence_of(token, query_starts, num_sequences)
    num_visible = context_of(token, sequence, query_starts, seq_lens)
    if tl.program_id(0) * KEYS >= num_visible:
        # This tile contains only later tokens.
        tl.store(target, tl.full([KEYS], float("-inf"), tl.float32), mask=row_mask)
        return

    key_mask = position < num_visible
    pages = page_table + sequence.to(tl.int64) * table_stride
    page = tl.load(pages + position // PAGE_SIZE, mask=key_mask, other=0)
    slot = position % PAGE_SIZE
    rows = keys + page * page_stride + slot * HEAD_SIZE
    total = tl.zeros([KEYS], tl.float32)
    for first in range(0, NUM_HEADS, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        head_mask = head < NUM_HEADS
        raw_scores = tl.zeros([HEADS, KEYS], tl.float32)
        for start in range(0, HEAD_SIZE, STEP):
            element = start + tl.arange(0, STEP)[None, :]
            element_mask = element < HEAD_SIZE
            pointers = query + token * query_stride + head * HEAD_SIZE + element
            q = tl.load(pointers, mask=head_mask & element_mask, other=0.0)
            k = tl.load(rows[:, None] + element, mask=key_mask[:, None] & element_mask, other=0.0)
            k = k.to(query.dtype.element_ty)  # exact: keys are as narrow as it, or narrower
            raw_scores = tl.dot(q, tl.trans(k), raw_scores, input_precision="ieee")
        weight = tl.load(weights + token * weights_stride + head, mask=head_mask, other=0.0)
        # Not tl.maximum(x, 0), which may turn NaN into 0.
        positive = tl.where(raw_scores < 0.0, 0.0, raw_scores)
        total += tl.sum(positive * weight.to(tl.float32), 0)
    if key_scales is not None:
        total *= tl.load(key_scales + page * scales_stride + slot, mask=key_mask, other=0.0)
    tl.store(target, tl.where(key_mask, total, float("-inf")), mask=row_mask)


def _scored(dtype: torch.dtype, cache_dtype: torch.dtype, *scales: Any) -> Callable[..., Any]:
    """Describe an ahead-of-time build: a step of 32 sequences, indexer sizes of DeepSeek-V3.2."""
    query, keys, weights = (dtype, 32, 64, 128), (cache_dtype, 4096, 64, 128), (FP32, 32, 64)
    return given(query, keys, weights, (INT64, 32, 128), (INT64, 33), (INT64, 32), 8192, *scales)


BUILDS = (
    Build(
        "indexer_scores_triton", "bfloat16, 64 heads of 128", _scored(BF16, BF16, None), matrix=True
    ),
    Build(
        "indexer_scores_triton", "float32, 64 heads of 128", _scored(FP32, FP32, None), "float32"
    ),
    Build(
        "indexer_scores_triton",
        "float8_e4m3fn keys, 64 heads of 128",
        _scored(BF16, E4M3, (FP32, 4096, 64)),
        matrix=True,
        **stored_as(E4M3),
    ),
)
