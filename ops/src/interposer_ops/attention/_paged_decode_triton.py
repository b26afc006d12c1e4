# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Decoding over a paged cache: sequences of one query, the keys of each in parts that are joined.

Dimensions: R rows of queries, N heads, K kv heads, G = N / K, D head size, B sequences, P pages,
S page size, C parts at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops.attention._attention_tiles_triton import LEAST_SIDE, LOG2E, joined, scored, seen


class PagedTile(NamedTuple):
    """Queries and keys of one program and turn, and how it is compiled.

    ``columns`` is a power of two that covers a head.
    """

    rows: int
    keys: int
    columns: int
    compiled: Mapping[str, int]

    @property
    def options(self) -> dict[str, int]:
        """The launch options of a kernel that takes ``KEYS`` and ``COLUMNS``."""
        return {"KEYS": self.keys, "COLUMNS": self.columns, **self.compiled}


@per_device
def paged_tile(kernel: str, device: torch.device, head_size: int, itemsize: int) -> PagedTile:
    """Return the tile for heads of ``head_size`` elements of ``itemsize`` bytes.

    The blocks: ``rows`` and ``keys``, the most of them; ``row_bytes`` and ``key_bytes``, the most
    that a tile of them takes, so that larger heads have fewer.
    """
    parameters = parameters_for(f"{kernel}_float32" if itemsize == 4 else kernel, device)
    blocks = parameters.blocks
    columns = max(LEAST_SIDE, triton.next_power_of_2(head_size))
    rows = min(blocks["rows"], max(LEAST_SIDE, blocks["row_bytes"] // (columns * itemsize)))
    keys = min(blocks["keys"], max(LEAST_SIDE, blocks["key_bytes"] // (columns * itemsize)))
    return PagedTile(rows, keys, columns, parameters.compiled)


@triton.jit
def over_keys(
    start, end, q, positions, largest, total, mixed, key_cache, value_cache, pages, num_keys,
    prefix, slope, scale, softcap, window, key_stride, value_stride,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return maximum, sum and mixed values with those of the keys from ``start`` to ``end``."""
    element = tl.arange(0, COLUMNS)[None, :]
    for tile in range(start, end, KEYS):
        key = tile + tl.arange(0, KEYS)
        if MASKED:
            held = key < num_keys
            page = tl.load(pages + key // PAGE_SIZE, mask=held, other=0)
            inside = held[:, None] & (element < HEAD_SIZE)
        else:
            page = tl.load(pages + key // PAGE_SIZE)
            inside = element < HEAD_SIZE
        slot = key % PAGE_SIZE * (NUM_KV_HEADS * HEAD_SIZE)
        key_rows = key_cache + (page * key_stride + slot)[:, None]
        value_rows = value_cache + (page * value_stride + slot)[:, None]
        k = tl.load(key_rows + element, mask=inside, other=0.0)
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        distance = positions - key[None, :]
        scores = scored(products, scale, softcap, slope, distance)
        if MASKED:
            visible = seen(positions, key[None, :], num_keys, window, prefix, CAUSAL, False)
            scores = tl.where(visible, scores, float("-inf"))
        v = tl.load(value_rows + element, mask=inside, other=0.0)
        largest, total, mixed = joined(scores, v.to(q.dtype), largest, total, mixed)
    return largest, total, mixed


def mix_parts(
    query: Tensor, cache: tuple[Tensor, ...],
    batch: tuple[Tensor, Tensor, Tensor | None], masks: tuple[Any, ...],
    strides: tuple[int, ...], sizes: dict[str, Any], out: Tensor, sinks: Tensor | None,
    value_scale: Tensor | None,
) -> None:  # fmt: skip
    """Fill the rows of ``out`` whose sequences have one query.

    Args:
        cache: keys, values, page table.
        batch: query starts, lengths of the sequences, lengths of their prefixes.
        masks, strides, sizes: arguments of the kernel, the window last among the masks.
    """
    device, (_, num_heads, head_size) = query.device, query.shape
    tile = paged_tile("paged_attention_decode", device, head_size, query.element_size())
    blocks = parameters_for("paged_attention_decode", device).blocks
    parting = {"PART": max(blocks["part"], tile.keys), "MOST": blocks["parts"]}
    query_starts, seq_lens, _ = batch
    window, page_table = masks[-1], cache[-1]
    num_sequences, longest = seq_lens.shape[0], page_table.shape[1] * sizes["PAGE_SIZE"]
    if window is not None:
        longest = min(longest, window + tile.keys)
    parts = min(parting["MOST"], triton.cdiv(longest, parting["PART"]))
    mixed = query.new_empty((num_sequences, parts, num_heads, head_size), dtype=torch.float32)
    sums = query.new_empty((2, num_sequences, parts, num_heads), dtype=torch.float32)
    rows = min(tile.rows, max(LEAST_SIDE, triton.next_power_of_2(sizes["GROUP"])))
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
    there = row < GROUP
    element = tl.arange(0, COLUMNS)[None, :]
    inside = there[:, None] & (element < HEAD_SIZE)
    within = head[:, None] * HEAD_SIZE + element
    q = tl.load(query + begin * query_stride + within, mask=inside, other=0.0)
    slope = None if slopes is None else tl.load(slopes + head, mask=there, other=0.0)[:, None]
    if key_scale is not None:
        scale = scale * tl.load(key_scale + kv_head % SCALES)
    total = tl.zeros([ROWS], tl.float32)
    largest = total - float("inf")
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    keys = key_cache + kv_head * HEAD_SIZE
    values = value_cache + kv_head * HEAD_SIZE
    pages = page_table + sequence.to(tl.int64) * table_stride
    # The one query is the last token, which a prefix shows nothing more.
    largest, total, mixed = over_keys(
        start, end, q, num_keys - 1, largest, total, mixed, keys, values, pages, num_keys,
        None, slope, scale, softcap, window, key_stride, value_stride,
        False, True, PAGE_SIZE, NUM_KV_HEADS, HEAD_SIZE, KEYS, COLUMNS,
    )  # fmt: skip
    place = (sequence.to(tl.int64) * tl.num_programs(0) + part) * (NUM_KV_HEADS * GROUP)
    tl.store(out + place * HEAD_SIZE + within, mixed, mask=inside)
    tl.store(out_largest + place + head, largest, mask=there)
    tl.store(out_total + place + head, total, mask=there)


@triton.jit
def _parting(num_keys, window, PART: tl.constexpr, MOST: tl.constexpr, KEYS: tl.constexpr):
    """Return where the keys of a sequence's last token start, the length of a part, and how many.

    Parts have PART tokens as long as MOST of them suffice; of longer sequences they are longer.
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
    part = tl.arange(0, MOST)  # all that there may be: sums have the same order in every batch
    there = part < parts
    place = (sequence.to(tl.int64) * stored_parts + part) * num_heads + head
    peaks = tl.load(largest + place, mask=there, other=float("-inf"))
    highest = tl.max(peaks, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(peaks - highest)
    whole = tl.sum(tl.load(total + place, mask=there, other=0.0) * weights, 0)
    if sinks is not None:
        whole += tl.exp2(sink - highest)
    element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = element < HEAD_SIZE
    rows = tl.load(
        mixed + place[:, None] * HEAD_SIZE + element[None, :],
        mask=there[:, None] & inside[None, :],
        other=0.0,
    )
    result = tl.sum(rows * weights[:, None], 0) / whole
    if value_scale is not None:
        result *= tl.load(value_scale + head // GROUP % VALUE_SCALES)
    target = out + (begin * num_heads + head) * HEAD_SIZE + element
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)
