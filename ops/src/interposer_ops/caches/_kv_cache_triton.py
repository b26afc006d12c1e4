# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Writing to, reading from and copying within a paged cache.

T tokens, K kv heads, D head size, B sequences, M pages of the longest sequence, P pages, S page
size, C copies.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from interposer_ops._triton.declare import COPIED, triton_kernel
from interposer_ops._triton.parameters import parameters_for
from interposer_ops._triton.rows import row_tile
from interposer_ops._triton.small_floats import (
    Fp8Format,
    clamped,
    fp8_format,
    fp8_memory,
    to_fp8,
)

_UNSCALED = Fp8Format(0, 0, False, 0.0)  # nothing is rounded, so no figure of it is read
# Copied as whole numbers, whatever they stand for: every GPU knows these.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton_kernel("reshape_and_cache")
def reshape_and_cache_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Compute ``reshape_and_cache``."""
    _store(key, value, key_cache, value_cache, slots, None, None, _UNSCALED)


@triton_kernel("reshape_and_cache_fp8")
def reshape_and_cache_fp8_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: torch.Tensor,
    value_scale: torch.Tensor,
    cache_dtype: torch.dtype,
) -> None:
    """Compute ``reshape_and_cache_fp8``."""
    keys, values = fp8_memory(key_cache), fp8_memory(value_cache)
    _store(key, value, keys, values, slots, key_scale, value_scale, fp8_format(cache_dtype))


@triton_kernel("gather_cache", dtypes=COPIED)
def gather_cache_triton(
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    num_tokens: int,
) -> torch.Tensor:
    """Compute ``gather_cache``."""
    shape = (num_tokens, *cache.shape[2:])
    out = torch.empty(shape, dtype=cache.dtype, device=cache.device)
    _gather(_bits(cache), page_table, seq_lens, starts, None, _bits(out))
    return out


@triton_kernel("gather_cache_fp8", judge="judge_fp8")
def gather_cache_fp8_triton(
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    scale: torch.Tensor,
    num_tokens: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``gather_cache_fp8``."""
    shape = (num_tokens, *cache.shape[2:])
    out = torch.empty(shape, dtype=out_dtype, device=cache.device)
    _gather(cache, page_table, seq_lens, starts, scale, out)
    return out


@triton_kernel("copy_pages", dtypes=COPIED)
def copy_pages_triton(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Compute ``copy_pages``; a page is a row."""
    num_copies, width = sources.shape[0], math.prod(key_cache.shape[1:])
    if num_copies == 0 or width == 0:
        return
    tile = row_tile("copy_pages", key_cache.device, width)
    _copy[(tile.row_blocks(num_copies), tile.column_blocks(width))](
        _bits(key_cache),
        _bits(value_cache),
        sources,
        targets,
        num_copies,
        key_cache.stride(0),
        value_cache.stride(0),
        WIDTH=width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_BITS[x.element_size()])


def _gather(
    cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_size = out.shape
    width = num_heads * head_size
    if num_tokens == 0 or width == 0:
        return
    # Nothing is gathered from sequences without pages, of which the cache may have none either.
    num_sequences = page_table.shape[0] if page_table.shape[1] else 0
    tile = row_tile("gather_cache", cache.device, width)
    # Each row of a program is compared with so many; programs of narrow rows have many of them.
    sequences = parameters_for("gather_cache", cache.device).blocks["sequences"]
    _gather_rows[(tile.row_blocks(num_tokens), tile.column_blocks(width))](
        cache,
        page_table,
        seq_lens,
        starts,
        scale,
        out,
        num_tokens,
        num_sequences,
        cache.stride(0),
        page_table.stride(0),
        PER_HEAD=scale is not None and scale.shape[0] > 1,
        PAGE_SIZE=cache.shape[1],
        HEAD_SIZE=head_size,
        WIDTH=width,
        SEQUENCES=min(sequences, tile.columns),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    stored: Fp8Format,
) -> None:
    num_tokens, num_heads, head_size = key.shape
    if num_tokens == 0:
        return
    tile = row_tile("reshape_and_cache", key.device, head_size)
    _store_rows[(tile.row_blocks(num_tokens * num_heads),)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        key_scale,
        value_scale,
        stored.largest,
        num_tokens,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        MANTISSA=stored.mantissa,
        BIAS=stored.bias,
        UNSIGNED_ZERO=stored.unsigned_zero,
        PER_HEAD=key_scale is not None and key_scale.shape[0] > 1,
        PAGE_SIZE=key_cache.shape[1],
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        COLUMNS=triton.next_power_of_2(head_size),
        ROWS=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _store_rows(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_scale,
    value_scale,
    largest,
    num_tokens,
    key_stride,
    value_stride,
    key_page_stride,
    value_page_stride,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    UNSIGNED_ZERO: tl.constexpr,
    PER_HEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    there = token < num_tokens
    element = tl.arange(0, COLUMNS)[None, :]
    inside = there & (element < HEAD_SIZE)
    source = head * HEAD_SIZE + element
    k = tl.load(key + token * key_stride + source, mask=inside, other=0.0)
    v = tl.load(value + token * value_stride + source, mask=inside, other=0.0)
    if key_scale is not None:
        k = _scaled(k, key_scale, head, there, largest, PER_HEAD)
        v = _scaled(v, value_scale, head, there, largest, PER_HEAD)
        k = to_fp8(k, key_cache.dtype.element_ty, MANTISSA, BIAS, UNSIGNED_ZERO)
        v = to_fp8(v, value_cache.dtype.element_ty, MANTISSA, BIAS, UNSIGNED_ZERO)
    slot = tl.load(slots + token, mask=there, other=0)
    target = (slot % PAGE_SIZE) * (NUM_HEADS * HEAD_SIZE) + source
    k_target = key_cache + (slot // PAGE_SIZE) * key_page_stride + target
    v_target = value_cache + (slot // PAGE_SIZE) * value_page_stride + target
    tl.store(k_target, k, mask=inside)
    tl.store(v_target, v, mask=inside)


@triton.jit
def _scaled(x, scale, head, there, largest, PER_HEAD: tl.constexpr):
    divisor = tl.load(scale + head, mask=there, other=1.0) if PER_HEAD else tl.load(scale)
    wide = x.to(tl.float32)
    return clamped(tl.div_rn(wide, tl.zeros_like(wide) + divisor), largest)


@triton.jit
def _gather_rows(
    cache,
    page_table,
    seq_lens,
    starts,
    scale,
    out,
    num_tokens,
    num_sequences,
    page_stride,
    table_stride,
    PER_HEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # The sequence of a row: how many end before it, and where the last of these did.
    sequence = tl.zeros([ROWS], tl.int64)
    first_row = tl.zeros([ROWS], tl.int64)
    so_far = tl.sum(first_row, 0)
    for base in range(0, num_sequences, SEQUENCES):
        number = base + tl.arange(0, SEQUENCES)
        lengths = tl.load(seq_lens + number, mask=number < num_sequences, other=0)
        ends = (so_far + tl.cumsum(lengths, 0))[None, :]
        over = (ends <= row[:, None]) & (number < num_sequences)[None, :]
        sequence += tl.sum(over.to(tl.int64), 1)
        first_row = tl.maximum(first_row, tl.max(tl.where(over, ends, 0), 1))
        so_far += tl.sum(lengths, 0)
    held = (sequence < num_sequences) & (row < num_tokens)
    position = tl.load(starts + sequence, mask=held, other=0) + row - first_row
    page = tl.load(page_table + sequence * table_stride + position // PAGE_SIZE, mask=held, other=0)
    source = page * page_stride + position % PAGE_SIZE * WIDTH

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < num_tokens)[:, None] & (column < WIDTH)
    stored = tl.load(cache + source[:, None] + column, mask=held[:, None] & there, other=0.0)
    if scale is not None:
        # The sequences' end is followed by zeros, whatever the scale.
        head = tl.where(there, column // HEAD_SIZE, 0) if PER_HEAD else tl.zeros_like(column)
        factor = tl.load(scale + head, mask=held[:, None] & there, other=0.0)
        stored = stored.to(tl.float32) * factor
    target = out + row[:, None] * WIDTH + column
    tl.store(target, stored.to(out.dtype.element_ty), mask=there)


@triton.jit
def _copy(
    key_cache,
    value_cache,
    sources,
    targets,
    num_copies,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    copy = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (copy < num_copies) & (column < WIDTH)
    source = tl.load(sources + copy, mask=copy < num_copies, other=0)
    target = tl.load(targets + copy, mask=copy < num_copies, other=0)
    k = tl.load(key_cache + source * key_stride + column, mask=inside)
    v = tl.load(value_cache + source * value_stride + column, mask=inside)
    tl.store(key_cache + target * key_stride + column, k, mask=inside)
    tl.store(value_cache + target * value_stride + column, v, mask=inside)
