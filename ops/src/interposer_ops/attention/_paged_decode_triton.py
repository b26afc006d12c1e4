# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Split-KV decode over a paged cache: one program per part of the keys, then a reduction.

Dimensions: R rows of queries, N heads, K kv heads, G = N / K, D head size, B sequences, P pages, S
page size, C largest number of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops.attention._attention_tiles_triton import (
    LOG2E,
    MIN_TILE_SIDE,
    accumulate_tile,
    attention_scores,
    is_visible,
)


class PagedTile(NamedTuple):
    """Queries and keys per program and loop iteration, and compiler options.

    ``columns`` is a power of two that covers a head.
    """

    rows: int
    keys: int
    columns: int
    compiled: Mapping[str, int]

    @property
    def options(self) -> dict[str, int]:
        """Launch options of a kernel that takes ``KEYS`` and ``COLUMNS``."""
        return {"KEYS": self.keys, "COLUMNS": self.columns, **self.compiled}


@per_device
def paged_tile(kernel: str, device: torch.device, head_size: int, itemsize: int) -> PagedTile:
    """Choose the tile for heads of ``head_size`` elements of ``itemsize`` bytes.

    Tuned block parameters: ``rows`` and ``keys``, the largest tile; ``row_bytes`` and
    ``key_bytes``, the largest size of a tile in bytes, so that larger heads get fewer rows and
    keys.
    """
    parameters = parameters_for(f"{kernel}_float32" if itemsize == 4 else kernel, device)
    blocks = parameters.blocks
    columns = max(MIN_TILE_SIDE, triton.next_power_of_2(head_size))
    rows = min(blocks["rows"], max(MIN_TILE_SIDE, blocks["row_bytes"] // (columns * itemsize)))
    keys = min(blocks["keys"], max(MIN_TILE_SIDE, blocks["key_bytes"] // (columns * itemsize)))
    return PagedTile(rows, keys, columns, parameters.compiled)


@triton.jit
def attend_keys(
    start, end, q, positions, largest, total, mixed, key_cache, value_cache, pages, num_keys,
    prefix, slope, scale, softcap, window, key_stride, value_stride,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the keys from ``start`` to ``end`` to the online softmax; return its new state."""
    element = tl.arange(0, COLUMNS)[None, :]
    for tile in range(start, end, KEYS):
        key = tile + tl.arange(0, KEYS)
        if MASKED:
            key_mask = key < num_keys
            page = tl.load(pages + key // PAGE_SIZE, mask=key_mask, other=0)
            element_mask = key_mask[:, None] & (element < HEAD_SIZE)
        else:
            page = tl.load(pages + key // PAGE_SIZE)
            element_mask = element < HEAD_SIZE
        slot = key % PAGE_SIZE * (NUM_KV_HEADS * HEAD_SIZE)
        key_rows = key_cache + (page * key_stride + slot)[:, None]
        value_rows = value_cache + (page * value_stride + slot)[:, None]
        k = tl.load(key_rows + element, mask=element_mask, other=0.0)
        raw_scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        distance = positions - key[None, :]
        scores = attention_scores(raw_scores, scale, softcap, slope, distance)
        if MASKED:
            visible = is_visible(positions, key[None, :], num_keys, window, prefix, CAUSAL, False)
            scores = tl.where(visible, scores, float("-inf"))
        v = tl.load(value_rows + element, mask=element_mask, other=0.0)
        largest, total, mixed = accumulate_tile(scores, v.to(q.dtype), largest, total, mixed)
    return largest, total, mixed


def mix_parts(
    query: Tensor, cache: tuple[Tensor, ...],
    batch: tuple[Tensor, Tensor, Tensor | None], masks: tuple[Any, ...],
    strides: tuple[int, ...], sizes: dict[str, Any], out: Tensor, sinks: Tensor | None,
    value_scale: Tensor | None,
) -> None:  # fmt: skip
    """Compute split-KV attention for all sequences that have one query, into rows of ``out``.

    Args:
        cache: keys, values, page table.
        batch: query starts, sequence lengths, prefix lengths.
        masks, strides, sizes: arguments of the kernel; the window is the last of ``masks``.
    """
    device, (_, num_heads, head_size) = query.device, query.shape
    tile = paged_tile("paged_attention_decode", device, head_size, query.element_size())
    blocks = parameters_for("paged_attention_decode", device).blocks
    # MOST bounds the scratch memory and the width of the join.
    parting = {"PART": max(blocks["part"], tile.keys), "MOST": blocks["parts"]}
    query_starts, seq_lens, _ = batch
    window, page_table = masks[-1], cache[-1]
    num_sequences, longest = seq_lens.shape[0], page_table.shape[1] * sizes["PAGE_SIZE"]
    if window is not None:
        # The first key is rounded down to a multiple of the tile.
        longest = min(longest, window + tile.keys)
    parts = min(parting["MOST"], triton.cdiv(longest, parting["PART"]))
    mixed = query.new_empty((num_sequences, parts, num_heads, head_size), dtype=torch.float32)
    sums = query.new_empty((2, num_sequences, parts, num_heads), dtype=torch.float32)
    rows = min(tile.rows, max(MIN_TILE_SIDE, triton.next_power_of_2(sizes["GROUP"])))
    row_blocks = triton.cdiv(sizes["GROUP"], rows)
    _mix_part[(parts, sizes["NUM_KV_HEADS"] * row_blocks, num_sequences)](
        query, *cache, *batch, *masks, *strides, mixed, *sums,
        **sizes, **parting, ROW_BLOCKS=row_blocks, ROWS=rows, **tile.options,
    )  # fmt: skip
    joining = parameters_for("paged_attention_join", device)
    columns = min(joining.blocks["width"], tile.columns)
    _join_parts[(num_heads, triton.cdiv(head_size, columns), num_sequences)](
        mixed, *sums, query_starts, seq_lens, sinks, value_scale, window, out, parts,
        **parting, KEYS=tile.keys, VALUE_SCALES=1 if value_scale is None else value_scale.shape[0],
        GROUP=sizes["GROUP"], HEAD_SIZE=head_size, COLUMNS=columns, **joining.compiled,
    )  # fmt: skip


@triton.jit
def _mix_part(
    query, key_cache, value_cache, page_table, query_starts, seq_lens, prefix_lens, slopes,
    key_scale, scale, softcap, window, query_stride, key_stride, value_stride, table_stride, out,
    out_largest, out_total,
    CAUSAL: tl.constexpr, SCALES: tl.constexpr, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr,
    KEYS: tl.constexpr, ROW_BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(2)
    kv_head = tl.program_id(1) // ROW_BLOCKS
    begin = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - begin != 1:
        return
    num_keys = tl.load(seq_lens + sequence).to(tl.int32)
    start, step, parts = _parting(num_keys, window, PART, MOST, KEYS)
    part = tl.program_id(0)
    if part >= parts:
        return
    start += part * step
    end = tl.minimum(num_keys, start + step)

    row = tl.program_id(1) % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    row_mask = row < GROUP
    element = tl.arange(0, COLUMNS)[None, :]
    element_mask = row_mask[:, None] & (element < HEAD_SIZE)
    row_offsets = head[:, None] * HEAD_SIZE + element
    q = tl.load(query + begin * query_stride + row_offsets, mask=element_mask, other=0.0)
    slope = None if slopes is None else tl.load(slopes + head, mask=row_mask, other=0.0)[:, None]
    # A head has one scale of keys, so multiply the scores by it instead of every key.
    if key_scale is not None:
        scale = scale * tl.load(key_scale + kv_head % SCALES)
    total = tl.zeros([ROWS], tl.float32)
    largest = total - float("inf")
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    keys = key_cache + kv_head * HEAD_SIZE
    values = value_cache + kv_head * HEAD_SIZE
    pages = page_table + sequence.to(tl.int64) * table_stride
    # The query is the last token and sees all keys anyway: neither causal mask nor prefix matter.
    largest, total, mixed = attend_keys(
        start, end, q, num_keys - 1, largest, total, mixed, keys, values, pages, num_keys,
        None, slope, scale, softcap, window, key_stride, value_stride,
        False, True, PAGE_SIZE, NUM_KV_HEADS, HEAD_SIZE, KEYS, COLUMNS,
    )  # fmt: skip
    part_offset = (sequence.to(tl.int64) * tl.num_programs(0) + part) * (NUM_KV_HEADS * GROUP)
    tl.store(out + part_offset * HEAD_SIZE + row_offsets, mixed, mask=element_mask)
    tl.store(out_largest + part_offset + head, largest, mask=row_mask)
    tl.store(out_total + part_offset + head, total, mask=row_mask)


@triton.jit
def _parting(num_keys, window, PART: tl.constexpr, MOST: tl.constexpr, KEYS: tl.constexpr):
    """Split a sequence's visible keys: return the first key, keys per part and number of parts.

    A part has PART tokens, or more if the sequence would otherwise need more than MOST parts.
    """
    start = num_keys * 0
    if window is not None:
        start = tl.maximum(start, num_keys - window) // KEYS * KEYS
    step = tl.maximum(PART, tl.cdiv(tl.cdiv(num_keys - start, MOST), KEYS) * KEYS)
    return start, step, tl.cdiv(num_keys - start, step)


@triton.jit
def _join_parts(
    mixed, largest, total, query_starts, seq_lens, sinks, value_scale, window, out, stored_parts,
    PART: tl.constexpr, MOST: tl.constexpr, KEYS: tl.constexpr, VALUE_SCALES: tl.constexpr,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(2)
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    begin = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - begin != 1:
        return
    num_keys = tl.load(seq_lens + sequence).to(tl.int32)
    _, _, parts = _parting(num_keys, window, PART, MOST, KEYS)
    # Always MOST parts, masked, so that the order of summation is the same in every batch.
    part = tl.arange(0, MOST)
    part_mask = part < parts
    part_offset = (sequence.to(tl.int64) * stored_parts + part) * num_heads + head
    peaks = tl.load(largest + part_offset, mask=part_mask, other=float("-inf"))
    highest = tl.max(peaks, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(peaks - highest)
    denominator = tl.sum(tl.load(total + part_offset, mask=part_mask, other=0.0) * weights, 0)
    if sinks is not None:
        denominator += tl.exp2(sink - highest)
    element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    element_mask = element < HEAD_SIZE
    rows = tl.load(
        mixed + part_offset[:, None] * HEAD_SIZE + element[None, :],
        mask=part_mask[:, None] & element_mask[None, :],
        other=0.0,
    )
    result = tl.sum(rows * weights[:, None], 0) / denominator
    # A head has one scale of values, so multiply the weighted sum instead of every value.
    if value_scale is not None:
        result *= tl.load(value_scale + head // GROUP % VALUE_SCALES)
    target = out + (begin * num_heads + head) * HEAD_SIZE + element
    tl.store(target, result.to(out.dtype.element_ty), mask=element_mask)
