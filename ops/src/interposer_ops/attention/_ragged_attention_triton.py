# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Attention without a cache in Triton, and the merge of two partial attention results.

T query tokens, U key tokens, N heads, K kv heads, D size of a query and key, E size of a value, B
sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, FP16, FP32, INT64, Build, dtype_name, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops._triton.rows import row_tile
from interposer_ops.attention._attention_tiles_triton import (
    LN2,
    LOG2E,
    MIN_TILE_SIDE,
    accumulate_tile,
    attention_scores,
    is_visible,
    keys_of_all,
    keys_of_any,
    normalise,
)


@triton_kernel("ragged_attention")
def ragged_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor,
    key_starts: Tensor, max_query_tokens: int, max_key_tokens: int, scale: float,
    causal: bool, window_tokens: int | None, softcap: float | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute ``ragged_attention`` by an online softmax over tiles of keys."""
    out = _result(query, value)
    starts, longest = (query_starts, key_starts), (max_query_tokens, max_key_tokens)
    masks = causal, window_tokens, softcap, sinks, alibi_slopes
    _launch(query, key, value, out, None, starts, longest, scale, *masks)
    return out


@triton_kernel("ragged_attention_with_lse")
def ragged_attention_with_lse_triton(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor,
    key_starts: Tensor, max_query_tokens: int, max_key_tokens: int, scale: float,
    causal: bool, window_tokens: int | None, softcap: float | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``ragged_attention_with_lse`` by an online softmax over tiles of keys."""
    out = _result(query, value)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    starts, longest = (query_starts, key_starts), (max_query_tokens, max_key_tokens)
    masks = causal, window_tokens, softcap, sinks, alibi_slopes
    _launch(query, key, value, out, lse, starts, longest, scale, *masks)
    return out, lse


@triton_kernel("merge_attention_states")
def merge_attention_states_triton(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``merge_attention_states``; each (token, head) pair is a row of one matrix."""
    num_tokens, num_heads, value_size = out_a.shape
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out, lse
    # Even values of size 0 need one program for the lse.
    tile = row_tile("merge_attention_states", out.device, max(1, value_size))
    _merge[(tile.row_blocks(num_rows), max(1, tile.column_blocks(value_size)))](
        out_a, lse_a, out_b, lse_b, out, lse, num_rows, out_a.stride(0), lse_a.stride(0),
        out_b.stride(0), lse_b.stride(0),
        NUM_HEADS=num_heads, VALUE_SIZE=value_size, **tile.options,
    )  # fmt: skip
    return out, lse


class _Tile(NamedTuple):
    """Queries and keys per program and loop iteration, and compiler options.

    ``front`` and ``tail``, powers of two, together cover the elements of a query: a single power of
    two would waste a third for the 192 elements of latent attention.
    """

    queries: int
    keys: int
    front: int
    tail: int
    value_columns: int
    compiled: Mapping[str, int]


@per_device
def _tile(device: torch.device, head_size: int, value_size: int, element_bytes: int) -> _Tile:
    """Choose the tile from the head sizes alone, so that results do not depend on the batch.

    Tuned block parameters: ``queries`` and ``keys``, the largest tile; ``query_bytes`` and
    ``key_bytes``, its largest size in bytes, for large heads. Most GPUs have no matrix instructions
    for float32, which has its own launch parameters.
    """
    wide = "_float32" if element_bytes == 4 else ""
    parameters = parameters_for(f"ragged_attention{wide}", device)
    blocks = parameters.blocks
    covering = max(MIN_TILE_SIDE, triton.next_power_of_2(head_size))
    front = max(MIN_TILE_SIDE, covering // 2)
    tail = max(MIN_TILE_SIDE, triton.next_power_of_2(max(1, head_size - front)))
    if front + tail >= covering:
        front, tail = covering, 0
    value_columns = max(MIN_TILE_SIDE, triton.next_power_of_2(value_size))
    row_bytes = max(front, value_columns) * element_bytes
    queries = max(MIN_TILE_SIDE, min(blocks["queries"], blocks["query_bytes"] // row_bytes))
    keys = max(MIN_TILE_SIDE, min(blocks["keys"], blocks["key_bytes"] // row_bytes))
    return _Tile(queries, keys, front, tail, value_columns, parameters.compiled)


def _result(query: Tensor, value: Tensor) -> Tensor:
    shape = (*query.shape[:2], value.shape[2])
    return torch.empty(shape, dtype=query.dtype, device=query.device)


def _launch(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    lse: Tensor | None, starts: tuple[Tensor, Tensor], longest: tuple[int, int],
    scale: float, causal: bool, window_tokens: int | None, softcap: float | None,
    sinks: Tensor | None, alibi_slopes: Tensor | None,
) -> None:  # fmt: skip
    num_tokens, num_heads, head_size = query.shape
    value_size = value.shape[2]
    if num_tokens == 0:
        return
    if window_tokens is not None:
        # No distance is larger; position + window then fits a 32-bit integer.
        window_tokens = min(window_tokens, sum(longest))
    tile = _tile(query.device, head_size, value_size, query.element_size())
    query_blocks = -(-longest[0] // tile.queries)
    _attend[(num_heads * query_blocks * (starts[0].shape[0] - 1),)](
        query, key, value, out, lse, *starts, sinks, alibi_slopes, scale, window_tokens, softcap,
        query_blocks, query.stride(0), key.stride(0), value.stride(0),
        CAUSAL=causal, NUM_HEADS=num_heads, GROUP=num_heads // key.shape[1], HEAD_SIZE=head_size,
        VALUE_SIZE=value_size, FRONT=tile.front, REST=tile.tail, VALUE_COLUMNS=tile.value_columns,
        QUERIES=tile.queries, KEYS=tile.keys, **tile.compiled,
    )  # fmt: skip


@triton.jit
def _attend(
    query, key, value, out, lse, query_starts, key_starts, sinks, alibi_slopes, scale, window,
    softcap, query_blocks, query_stride, key_stride, value_stride,
    CAUSAL: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, FRONT: tl.constexpr, REST: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share keys in cache: heads vary fastest, then the tiles of a sequence.
    head = tl.program_id(0) % NUM_HEADS
    tile = tl.program_id(0) // NUM_HEADS
    sequence = tile // query_blocks
    # Last tile first: under a causal mask the last tiles take longest and should start early.
    first = (query_blocks - 1 - tile % query_blocks) * QUERIES
    query_start = tl.load(query_starts + sequence)
    num_queries = (tl.load(query_starts + sequence + 1) - query_start).to(tl.int32)
    if first >= num_queries:
        return
    key_start = tl.load(key_starts + sequence)
    num_keys = (tl.load(key_starts + sequence + 1) - key_start).to(tl.int32)

    offset = first + tl.arange(0, QUERIES)
    query_mask = offset < num_queries
    queries = query + query_start * query_stride + head * HEAD_SIZE
    q = _rows(queries, offset.to(tl.int64), query_stride, query_mask, 0, FRONT, HEAD_SIZE)
    if REST > 0:
        q_rest = _rows(
            queries, offset.to(tl.int64), query_stride, query_mask, FRONT, REST, HEAD_SIZE
        )
    position = (num_keys - num_queries + offset)[:, None]
    nearest = num_keys - num_queries + first
    farthest = num_keys - num_queries + tl.minimum(first + QUERIES, num_queries) - 1
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head)

    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    # The sink starts the online softmax: it is the maximum, adds exp2(0) to the sum, has no value.
    if sinks is not None:
        largest = tl.zeros_like(total) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    mixed = tl.zeros([QUERIES, VALUE_COLUMNS], tl.float32)

    kv_head = head // GROUP
    keys = key + key_start * key_stride + kv_head * HEAD_SIZE
    values = value + key_start * value_stride + kv_head * VALUE_SIZE
    start, end = keys_of_any(nearest, farthest, num_keys, window, None, CAUSAL, True)
    whole_start, whole_end = keys_of_all(nearest, farthest, num_keys, window, None, CAUSAL, True)
    for base in range(start // KEYS * KEYS, end, KEYS):
        key_position = base + tl.arange(0, KEYS)
        key_mask = key_position < num_keys
        token = key_position.to(tl.int64)
        k = _rows(keys, token, key_stride, key_mask, 0, FRONT, HEAD_SIZE)
        raw_scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k = _rows(keys, token, key_stride, key_mask, FRONT, REST, HEAD_SIZE)
            raw_scores = tl.dot(q_rest, tl.trans(k), raw_scores, input_precision="ieee")
        scores = attention_scores(
            raw_scores, scale, softcap, slopes, position - key_position[None, :]
        )
        # Only tiles at a border of the visible keys need a mask.
        if (base < whole_start) | (base + KEYS > whole_end):
            visible = is_visible(
                position, key_position[None, :], num_keys, window, None, CAUSAL, True
            )
            scores = tl.where(visible, scores, float("-inf"))
        v = _rows(values, token, value_stride, key_mask, 0, VALUE_COLUMNS, VALUE_SIZE)
        largest, total, mixed = accumulate_tile(scores, v, largest, total, mixed)

    row = (query_start + offset) * NUM_HEADS + head
    if lse is not None:
        # Without a visible key and a sink the sum is 0 and the logarithm -inf, as specified.
        tl.store(lse + row, largest * LN2 + tl.log(total), mask=query_mask)
    column = tl.arange(0, VALUE_COLUMNS)[None, :]
    target = out + row[:, None] * VALUE_SIZE + column
    result = normalise(mixed, total).to(out.dtype.element_ty)
    tl.store(target, result, mask=query_mask[:, None] & (column < VALUE_SIZE))


@triton.jit
def _rows(
    pointer, token, stride, row_mask, START: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr
):
    """Load ``COLUMNS`` elements of each row ``[R]`` from element ``START`` on, zeros if masked."""
    column = START + tl.arange(0, COLUMNS)[None, :]
    pointers = pointer + token[:, None] * stride + column
    if START + COLUMNS <= SIZE:
        tile = tl.load(pointers, mask=row_mask[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=row_mask[:, None] & (column < SIZE), other=0.0)
    return tile


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out, lse, num_rows, out_a_stride, lse_a_stride, out_b_stride,
    lse_b_stride,
    NUM_HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = row < num_rows
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    # The lse is float32 or wider already.
    a = tl.load(lse_a + token * lse_a_stride + head, mask=row_mask, other=0.0)
    b = tl.load(lse_b + token * lse_b_stride + head, mask=row_mask, other=0.0)
    largest = tl.maximum(a, b)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a = tl.exp(a - largest)
    weight_b = tl.exp(b - largest)
    total = weight_a + weight_b  # 0 without keys, else at least 1
    if tl.program_id(1) == 0:
        tl.store(lse + row, largest + tl.log(total), mask=row_mask)

    element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    element_mask = row_mask & (element < VALUE_SIZE)
    column = head * VALUE_SIZE + element
    side_a = tl.load(out_a + token * out_a_stride + column, mask=element_mask, other=0.0)
    side_b = tl.load(out_b + token * out_b_stride + column, mask=element_mask, other=0.0)
    mixed = weight_a * side_a.to(tl.float32) + weight_b * side_b.to(tl.float32)
    mixed = mixed / tl.maximum(total, 1.0)
    tl.store(out + row * VALUE_SIZE + element, mixed.to(out.dtype.element_ty), mask=element_mask)


def _build(
    label: str,
    heads: tuple[int, int, int, int],
    *,
    kernel: str = "ragged_attention_triton",
    dtype: torch.dtype = BF16,
    causal: bool = True,
    window_tokens: int | None = None,
    softcap: float | None = None,
    **features: bool,
) -> Build:
    """Describe an ahead-of-time build for four sequences with 4096 tokens together.

    Args:
        heads: heads, kv heads, sizes of a query and of a value.
        features: sinks, alibi.
    """
    num_heads, kv_heads, head_size, value_size = heads
    sinks, alibi = features.get("sinks", False), features.get("alibi", False)
    arguments = given(
        (dtype, 4096, num_heads, head_size),
        *((dtype, 4096, kv_heads, size) for size in (head_size, value_size)),
        *((INT64, 5), (INT64, 5), 4096, 4096, head_size**-0.5, causal, window_tokens, softcap),
        *((dtype, num_heads) if sinks else None, (FP32, num_heads) if alibi else None),
    )
    names = ("num_heads", "num_kv_heads", "head_size", "value_size")
    dims: dict[str, Any] = {
        **dict(zip(names, heads, strict=True)),
        "causal": causal,
        "windowed": window_tokens is not None,
        "softcapped": softcap is not None,
        "sinks": sinks,
        "alibi": alibi,
    }
    return Build(kernel, label, arguments, dtype_name(dtype), dims, matrix=dtype is not FP32)


_OUT, _LSE = (BF16, 64, 128, 128), (FP32, 64, 128)

BUILDS = (
    _build("causal, 32 and 8 heads of 128", (32, 8, 128, 128)),
    _build("causal, 32 and 8 heads of 64", (32, 8, 64, 64)),
    _build("causal, 16 and 8 heads of 256", (16, 8, 256, 256)),
    _build("encoder, 16 heads of 80, float16", (16, 16, 80, 80), dtype=FP16, causal=False),
    _build(
        "window and softcap, 16 and 8 heads of 256",
        (16, 8, 256, 256),
        window_tokens=4096,
        softcap=50.0,
    ),
    _build(
        "window and sinks, 64 and 8 heads of 64", (64, 8, 64, 64), window_tokens=128, sinks=True
    ),
    _build("ALiBi, 32 heads of 128", (32, 32, 128, 128), alibi=True),
    _build("causal, 8 heads of 64, float32", (8, 8, 64, 64), dtype=FP32),
    _build(
        "latent, 128 heads of 192 and 128",
        (128, 128, 192, 128),
        kernel="ragged_attention_with_lse_triton",
    ),
    Build(
        "merge_attention_states_triton",
        "128 heads of 128",
        given(_OUT, _LSE, _OUT, _LSE),
        dims={"num_heads": 128, "value_size": 128},
    ),
)
