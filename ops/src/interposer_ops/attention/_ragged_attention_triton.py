# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Attention without a cache, one pass over the keys for each tile of queries.

T query tokens, U key tokens, N heads, K kv heads, D size of a query and key, E size of a value, B
sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops.attention._attention_tiles_triton import (
    LN2,
    LOG2E,
    joined,
    quotient,
    scored,
    seen,
    seen_by_all,
    seen_by_any,
)

_LEAST = 16  # of a side of the tiles that tl.dot multiplies


@triton_kernel("ragged_attention")
def ragged_attention_triton(
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
    """Compute ``ragged_attention``."""
    out = _result(query, value)
    starts, longest = (query_starts, key_starts), (max_query_tokens, max_key_tokens)
    masks = causal, window_tokens, softcap, sinks, alibi_slopes
    _launch(query, key, value, out, None, starts, longest, scale, *masks)
    return out


@triton_kernel("ragged_attention_with_lse")
def ragged_attention_with_lse_triton(
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
    """Compute ``ragged_attention_with_lse``."""
    out = _result(query, value)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    starts, longest = (query_starts, key_starts), (max_query_tokens, max_key_tokens)
    masks = causal, window_tokens, softcap, sinks, alibi_slopes
    _launch(query, key, value, out, lse, starts, longest, scale, *masks)
    return out, lse


class _Tile(NamedTuple):
    """What a program treats at once, and how it is compiled.

    ``front`` and ``rest``, powers of two, cover the elements of a query: one power of two would be
    a third too many for the 192 of latent attention.
    """

    queries: int
    keys: int
    front: int
    rest: int
    value_columns: int
    num_warps: int
    num_stages: int


@per_device
def _tile(device: torch.device, head_size: int, value_size: int, element_bytes: int) -> _Tile:
    """Return the tile for heads of these sizes; it depends on nothing else.

    Blocks: ``queries`` and ``keys``, the most of them in a tile; ``query_bytes`` and ``key_bytes``,
    what they may take of one, where heads are large. Most GPUs have no matrix instructions for
    float32, which has launch parameters of its own.
    """
    wide = "_float32" if element_bytes == 4 else ""
    parameters = parameters_for(f"ragged_attention{wide}", device)
    blocks = parameters.blocks
    covering = max(_LEAST, triton.next_power_of_2(head_size))
    front = max(_LEAST, covering // 2)
    rest = max(_LEAST, triton.next_power_of_2(max(1, head_size - front)))
    if front + rest >= covering:
        front, rest = covering, 0
    value_columns = max(_LEAST, triton.next_power_of_2(value_size))
    row_bytes = max(front, value_columns) * element_bytes
    queries = max(_LEAST, min(blocks["queries"], blocks["query_bytes"] // row_bytes))
    keys = max(_LEAST, min(blocks["keys"], blocks["key_bytes"] // row_bytes))
    warps, stages = parameters.num_warps, parameters.num_stages
    return _Tile(queries, keys, front, rest, value_columns, warps, stages)


def _result(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    shape = (*query.shape[:2], value.shape[2])
    return torch.empty(shape, dtype=query.dtype, device=query.device)


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float,
    causal: bool,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> None:
    num_tokens, num_heads, head_size = query.shape
    value_size = value.shape[2]
    if num_tokens == 0:
        return
    if window_tokens is not None:
        # No distance is larger, and position + window stays a 32-bit integer.
        window_tokens = min(window_tokens, sum(longest))
    tile = _tile(query.device, head_size, value_size, query.element_size())
    query_blocks = -(-longest[0] // tile.queries)
    _attend[(num_heads * query_blocks * (starts[0].shape[0] - 1),)](
        query,
        key,
        value,
        out,
        lse,
        *starts,
        sinks,
        alibi_slopes,
        scale,
        window_tokens,
        softcap,
        query_blocks,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        CAUSAL=causal,
        NUM_HEADS=num_heads,
        GROUP=num_heads // key.shape[1],
        HEAD_SIZE=head_size,
        VALUE_SIZE=value_size,
        FRONT=tile.front,
        REST=tile.rest,
        VALUE_COLUMNS=tile.value_columns,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _attend(
    query,
    key,
    value,
    out,
    lse,
    query_starts,
    key_starts,
    sinks,
    alibi_slopes,
    scale,
    window,
    softcap,
    query_blocks,
    query_stride,
    key_stride,
    value_stride,
    CAUSAL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    FRONT: tl.constexpr,
    REST: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    # Neighbours read the same keys: heads first, then the tiles of a sequence.
    head = tl.program_id(0) % NUM_HEADS
    tile = tl.program_id(0) // NUM_HEADS
    sequence = tile // query_blocks
    # From the last tile to the first: under a causal mask the last ones take the longest.
    first = (query_blocks - 1 - tile % query_blocks) * QUERIES
    query_start = tl.load(query_starts + sequence)
    num_queries = (tl.load(query_starts + sequence + 1) - query_start).to(tl.int32)
    if first >= num_queries:
        return
    key_start = tl.load(key_starts + sequence)
    num_keys = (tl.load(key_starts + sequence + 1) - key_start).to(tl.int32)

    offset = first + tl.arange(0, QUERIES)
    there = offset < num_queries
    queries = query + query_start * query_stride + head * HEAD_SIZE
    q = _rows(queries, offset.to(tl.int64), query_stride, there, 0, FRONT, HEAD_SIZE)
    if REST > 0:
        q_rest = _rows(queries, offset.to(tl.int64), query_stride, there, FRONT, REST, HEAD_SIZE)
    position = (num_keys - num_queries + offset)[:, None]
    nearest = num_keys - num_queries + first
    farthest = num_keys - num_queries + tl.minimum(first + QUERIES, num_queries) - 1
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head)

    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if sinks is not None:
        largest = tl.zeros_like(total) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    mixed = tl.zeros([QUERIES, VALUE_COLUMNS], tl.float32)

    kv_head = head // GROUP
    keys = key + key_start * key_stride + kv_head * HEAD_SIZE
    values = value + key_start * value_stride + kv_head * VALUE_SIZE
    start, end = seen_by_any(nearest, farthest, num_keys, window, None, CAUSAL, True)
    whole_start, whole_end = seen_by_all(nearest, farthest, num_keys, window, None, CAUSAL, True)
    for base in range(start // KEYS * KEYS, end, KEYS):
        place = base + tl.arange(0, KEYS)
        near = place < num_keys
        token = place.to(tl.int64)
        k = _rows(keys, token, key_stride, near, 0, FRONT, HEAD_SIZE)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k = _rows(keys, token, key_stride, near, FRONT, REST, HEAD_SIZE)
            products = tl.dot(q_rest, tl.trans(k), products, input_precision="ieee")
        scores = scored(products, scale, softcap, slopes, position - place[None, :])
        if (base < whole_start) | (base + KEYS > whole_end):
            visible = seen(position, place[None, :], num_keys, window, None, CAUSAL, True)
            scores = tl.where(visible, scores, float("-inf"))
        v = _rows(values, token, value_stride, near, 0, VALUE_COLUMNS, VALUE_SIZE)
        largest, total, mixed = joined(scores, v, largest, total, mixed)

    row = (query_start + offset) * NUM_HEADS + head
    if lse is not None:
        # No key and no sink: -inf, as the logarithm of nothing is.
        tl.store(lse + row, largest * LN2 + tl.log(total), mask=there)
    column = tl.arange(0, VALUE_COLUMNS)[None, :]
    target = out + row[:, None] * VALUE_SIZE + column
    result = quotient(mixed, total).to(out.dtype.element_ty)
    tl.store(target, result, mask=there[:, None] & (column < VALUE_SIZE))


@triton.jit
def _rows(
    pointer, token, stride, there, START: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr
):
    """Return elements from ``START`` on of the rows ``[R]``, zeros where there are none."""
    column = START + tl.arange(0, COLUMNS)[None, :]
    source = pointer + token[:, None] * stride + column
    if START + COLUMNS <= SIZE:
        tile = tl.load(source, mask=there[:, None], other=0.0)
    else:
        tile = tl.load(source, mask=there[:, None] & (column < SIZE), other=0.0)
    return tile
