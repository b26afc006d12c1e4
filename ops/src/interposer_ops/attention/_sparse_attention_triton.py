# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Scores of the tokens that sparse attention chooses from.

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
from interposer_ops.attention._attention_tiles_triton import LEAST_SIDE, context_of, sequence_of
from interposer_ops.caches._kv_cache_triton import stored_as

_MOST_PROGRAMS = 65535  # along the second axis of a grid


@triton_kernel("indexer_scores", judge="judge_fp8")
def indexer_scores_triton(
    query: Tensor, keys: Tensor, weights: Tensor, page_table: Tensor,
    query_starts: Tensor, seq_lens: Tensor, max_seq_tokens: int,
    key_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``indexer_scores``; heads are the rows of a tile, a key is scaled at the end."""
    num_tokens, num_heads, head_size = query.shape
    shape = num_tokens, max_seq_tokens
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    if scores.numel() == 0:
        return scores
    tile = _tile(query.device, query.dtype, num_heads, head_size)
    key_blocks = -(-max_seq_tokens // tile.keys)
    for first in range(0, num_tokens, _MOST_PROGRAMS):
        _score[(key_blocks, min(_MOST_PROGRAMS, num_tokens - first))](
            query, keys, weights, page_table, query_starts, seq_lens, key_scales, scores, first,
            max_seq_tokens, page_table.shape[0], query.stride(0), keys.stride(0), weights.stride(0),
            page_table.stride(0), 0 if key_scales is None else key_scales.stride(0),
            NUM_HEADS=num_heads, HEAD_SIZE=head_size, PAGE_SIZE=keys.shape[1], HEADS=tile.heads,
            KEYS=tile.keys, STEP=tile.step, **tile.compiled,
        )  # fmt: skip
    return scores


class _Tile(NamedTuple):
    """The heads and keys of one program, which takes ``step`` elements of a head at a time."""

    heads: int
    keys: int
    step: int
    compiled: Mapping[str, int]


@per_device
def _tile(device: torch.device, dtype: torch.dtype, num_heads: int, head_size: int) -> _Tile:
    """Return the tile for heads of this number and size; it depends on nothing else.

    Blocks: ``heads`` and ``keys``, the most of a tile; ``step``, the most elements.
    """
    name = "indexer_scores_float32" if dtype == torch.float32 else "indexer_scores"
    parameters = parameters_for(name, device)
    blocks = parameters.blocks
    return _Tile(
        min(blocks["heads"], max(LEAST_SIDE, triton.next_power_of_2(num_heads))),
        blocks["keys"],
        min(blocks["step"], max(LEAST_SIDE, triton.next_power_of_2(head_size))),
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
    inside = position < max_seq_tokens
    sequence = sequence_of(token, query_starts, num_sequences)
    num_seen = context_of(token, sequence, query_starts, seq_lens)
    if tl.program_id(0) * KEYS >= num_seen:
        tl.store(target, tl.full([KEYS], float("-inf"), tl.float32), mask=inside)
        return

    seen = position < num_seen
    pages = page_table + sequence.to(tl.int64) * table_stride
    page = tl.load(pages + position // PAGE_SIZE, mask=seen, other=0)
    slot = position % PAGE_SIZE
    rows = keys + page * page_stride + slot * HEAD_SIZE
    total = tl.zeros([KEYS], tl.float32)
    for first in range(0, NUM_HEADS, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        there = head < NUM_HEADS
        products = tl.zeros([HEADS, KEYS], tl.float32)
        for start in range(0, HEAD_SIZE, STEP):
            element = start + tl.arange(0, STEP)[None, :]
            known = element < HEAD_SIZE
            source = query + token * query_stride + head * HEAD_SIZE + element
            q = tl.load(source, mask=there & known, other=0.0)
            k = tl.load(rows[:, None] + element, mask=seen[:, None] & known, other=0.0)
            k = k.to(query.dtype.element_ty)  # exact: keys are as narrow as it, or narrower
            products = tl.dot(q, tl.trans(k), products, input_precision="ieee")
        weight = tl.load(weights + token * weights_stride + head, mask=there, other=0.0)
        # Of a NaN maximum(x, 0) may make 0.
        positive = tl.where(products < 0.0, 0.0, products)
        total += tl.sum(positive * weight.to(tl.float32), 0)
    if key_scales is not None:
        total *= tl.load(key_scales + page * scales_stride + slot, mask=seen, other=0.0)
    tl.store(target, tl.where(seen, total, float("-inf")), mask=inside)


def _scored(dtype: torch.dtype, cache_dtype: torch.dtype, *scales: Any) -> Callable[..., Any]:
    """Return a step of 32 sequences, with the indexer of DeepSeek-V3.2."""
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
