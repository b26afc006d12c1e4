# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What a program that attends to a paged cache does with one part of the keys of a sequence.

Dimensions: R rows of queries, D head size, P pages, S page size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops.attention._attention_tiles_triton import joined, scored, seen

LEAST_SIDE = 16
"""The least elements of each side of what tl.dot multiplies."""


class PagedTile(NamedTuple):
    """Queries and keys of one program and turn, and how it is compiled.

    ``columns`` is a power of two that covers a head.
    """

    rows: int
    keys: int
    columns: int
    num_warps: int
    num_stages: int


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
    return PagedTile(rows, keys, columns, parameters.num_warps, parameters.num_stages)


@triton.jit
def over_keys(
    start,
    end,
    q,
    positions,
    largest,
    total,
    mixed,
    key_cache,
    value_cache,
    pages,
    num_keys,
    prefix,
    slope,
    scale,
    softcap,
    window,
    key_stride,
    value_stride,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
