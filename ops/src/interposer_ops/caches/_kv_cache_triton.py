# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Writing to and reading from a paged cache, in Triton.

T tokens, K kv heads, D head size, B sequences, M pages of the longest sequence, P pages, S page
size, C latent size, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, E4M3, E5M2, FP32, INT64, Build, dtype_name, given
from interposer_ops._triton.declare import COPIED, triton_kernel
from interposer_ops._triton.parameters import parameters_for
from interposer_ops._triton.rows import row_tile
from interposer_ops._triton.small_floats import Fp8Format, clamped, fp8_format, fp8_memory, to_fp8

_UNSCALED = Fp8Format(0, 0, False, 0.0)  # placeholder: without scales nothing is rounded
# Copies use integers of the same size, which every GPU supports, unlike some float dtypes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton_kernel("reshape_and_cache")
def reshape_and_cache_triton(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
    slots: Tensor,
) -> None:  # fmt: skip
    """Compute ``reshape_and_cache`` in Triton: store keys and values in their slots."""
    _store(key, value, key_cache, value_cache, slots, None, None, _UNSCALED)


@triton_kernel("reshape_and_cache_fp8")
def reshape_and_cache_fp8_triton(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
    slots: Tensor, key_scale: Tensor, value_scale: Tensor,
    cache_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Compute ``reshape_and_cache_fp8`` in Triton: store keys and values in 8-bit floats."""
    keys, values = fp8_memory(key_cache), fp8_memory(value_cache)
    _store(key, value, keys, values, slots, key_scale, value_scale, fp8_format(cache_dtype))


@triton_kernel("gather_cache", dtypes=COPIED)
def gather_cache_triton(
    cache: Tensor, page_table: Tensor, seq_lens: Tensor, starts: Tensor,
    num_tokens: int,
) -> Tensor:  # fmt: skip
    """Compute ``gather_cache`` in Triton: copy cached rows to a contiguous tensor."""
    shape = (num_tokens, *cache.shape[2:])
    out = torch.empty(shape, dtype=cache.dtype, device=cache.device)
    _gather(_bits(cache), page_table, seq_lens, starts, None, _bits(out))
    return out


@triton_kernel("gather_cache_fp8", judge="judge_fp8")
def gather_cache_fp8_triton(
    cache: Tensor, page_table: Tensor, seq_lens: Tensor, starts: Tensor,
    scale: Tensor, num_tokens: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``gather_cache_fp8`` in Triton: gather cached rows, times a scale."""
    shape = (num_tokens, *cache.shape[2:])
    out = torch.empty(shape, dtype=out_dtype, device=cache.device)
    _gather(cache, page_table, seq_lens, starts, scale, out)
    return out


@triton_kernel("write_latent_cache")
def write_latent_cache_triton(
    latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor
) -> None:
    """Compute ``write_latent_cache`` by copying the bits of both parts."""
    num_tokens, latent_size = latent.shape
    rotary_size = rope_key.shape[1]
    if num_tokens == 0 or latent_size + rotary_size == 0:
        return
    tile = row_tile("write_latent_cache", latent.device, max(1, latent_size))
    _store_latents[(tile.row_blocks(num_tokens),)](
        latent, rope_key, cache, slots, num_tokens, latent.stride(0), rope_key.stride(0),
        cache.stride(0),
        PAGE_SIZE=cache.shape[1], LATENT_SIZE=latent_size, ROTARY_SIZE=rotary_size,
        ROTARY_COLUMNS=min(tile.columns, triton.next_power_of_2(max(1, rotary_size))),
        **tile.options,
    )  # fmt: skip


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])


def _gather(
    cache: Tensor, page_table: Tensor, seq_lens: Tensor, starts: Tensor,
    scale: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    num_tokens, num_heads, head_size = out.shape
    width = num_heads * head_size
    if num_tokens == 0 or width == 0:
        return
    # Sequences without pages have no tokens, and the cache may have no pages either.
    num_sequences = page_table.shape[0] if page_table.shape[1] else 0
    tile = row_tile("gather_cache", cache.device, width)
    # Sequences compared with each row in one step; programs for narrow rows have many rows.
    sequences = parameters_for("gather_cache", cache.device).blocks["sequences"]
    _gather_rows[(tile.row_blocks(num_tokens), tile.column_blocks(width))](
        cache, page_table, seq_lens, starts, scale, out, num_tokens, num_sequences, cache.stride(0),
        page_table.stride(0),
        PER_HEAD=scale is not None and scale.shape[0] > 1, PAGE_SIZE=cache.shape[1],
        HEAD_SIZE=head_size, WIDTH=width, SEQUENCES=min(sequences, tile.columns), **tile.options,
    )  # fmt: skip


def _store(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
    slots: Tensor, key_scale: Tensor | None, value_scale: Tensor | None,
    cache_format: Fp8Format,
) -> None:  # fmt: skip
    num_tokens, num_heads, head_size = key.shape
    if num_tokens == 0:
        return
    tile = row_tile("reshape_and_cache", key.device, head_size)
    _store_rows[(tile.row_blocks(num_tokens * num_heads),)](
        key, value, key_cache, value_cache, slots, key_scale, value_scale, cache_format.largest,
        num_tokens, key.stride(0), value.stride(0), key_cache.stride(0), value_cache.stride(0),
        MANTISSA=cache_format.mantissa, BIAS=cache_format.bias,
        UNSIGNED_ZERO=cache_format.unsigned_zero,
        PER_HEAD=key_scale is not None and key_scale.shape[0] > 1, PAGE_SIZE=key_cache.shape[1],
        NUM_HEADS=num_heads, HEAD_SIZE=head_size, COLUMNS=triton.next_power_of_2(head_size),
        ROWS=tile.rows, **tile.compiled,
    )  # fmt: skip


@triton.jit
def _store_rows(
    key, value, key_cache, value_cache, slots, key_scale, value_scale, largest, num_tokens,
    key_stride, value_stride, key_page_stride, value_page_stride,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, UNSIGNED_ZERO: tl.constexpr, PER_HEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    token_mask = token < num_tokens
    element = tl.arange(0, COLUMNS)[None, :]
    element_mask = token_mask & (element < HEAD_SIZE)
    element_offset = head * HEAD_SIZE + element
    k = tl.load(key + token * key_stride + element_offset, mask=element_mask, other=0.0)
    v = tl.load(value + token * value_stride + element_offset, mask=element_mask, other=0.0)
    if key_scale is not None:
        k = _scaled(k, key_scale, head, token_mask, largest, PER_HEAD)
        v = _scaled(v, value_scale, head, token_mask, largest, PER_HEAD)
        k = to_fp8(k, key_cache.dtype.element_ty, MANTISSA, BIAS, UNSIGNED_ZERO)
        v = to_fp8(v, value_cache.dtype.element_ty, MANTISSA, BIAS, UNSIGNED_ZERO)
    slot = tl.load(slots + token, mask=token_mask, other=0)
    target = (slot % PAGE_SIZE) * (NUM_HEADS * HEAD_SIZE) + element_offset
    k_target = key_cache + (slot // PAGE_SIZE) * key_page_stride + target
    v_target = value_cache + (slot // PAGE_SIZE) * value_page_stride + target
    tl.store(k_target, k, mask=element_mask)
    tl.store(v_target, v, mask=element_mask)


@triton.jit
def _scaled(x, scale, head, token_mask, largest, PER_HEAD: tl.constexpr):
    divisor = tl.load(scale + head, mask=token_mask, other=1.0) if PER_HEAD else tl.load(scale)
    wide = x.to(tl.float32)
    return clamped(tl.div_rn(wide, tl.zeros_like(wide) + divisor), largest)


@triton.jit
def _gather_rows(
    cache, page_table, seq_lens, starts, scale, out, num_tokens, num_sequences, page_stride,
    table_stride,
    PER_HEAD: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    SEQUENCES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # The sequence of a row is the number of sequences that end at or before the row. The sequence
    # begins where the last of these sequences ends.
    sequence = tl.zeros([ROWS], tl.int64)
    first_row = tl.zeros([ROWS], tl.int64)
    total_tokens = tl.sum(first_row, 0)
    for base in range(0, num_sequences, SEQUENCES):
        number = base + tl.arange(0, SEQUENCES)
        lengths = tl.load(seq_lens + number, mask=number < num_sequences, other=0)
        ends = (total_tokens + tl.cumsum(lengths, 0))[None, :]
        is_past = (ends <= row[:, None]) & (number < num_sequences)[None, :]
        sequence += tl.sum(is_past.to(tl.int64), 1)
        first_row = tl.maximum(first_row, tl.max(tl.where(is_past, ends, 0), 1))
        total_tokens += tl.sum(lengths, 0)
    is_token = (sequence < num_sequences) & (row < num_tokens)
    position = tl.load(starts + sequence, mask=is_token, other=0) + row - first_row
    page = tl.load(
        page_table + sequence * table_stride + position // PAGE_SIZE, mask=is_token, other=0
    )
    row_offset = page * page_stride + position % PAGE_SIZE * WIDTH

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    element_mask = (row < num_tokens)[:, None] & (column < WIDTH)
    stored = tl.load(
        cache + row_offset[:, None] + column, mask=is_token[:, None] & element_mask, other=0.0
    )
    if scale is not None:
        # Rows after the last sequence must be zero even if the scale is NaN, so it is masked, too.
        head = tl.where(element_mask, column // HEAD_SIZE, 0) if PER_HEAD else tl.zeros_like(column)
        factor = tl.load(scale + head, mask=is_token[:, None] & element_mask, other=0.0)
        stored = stored.to(tl.float32) * factor
    target = out + row[:, None] * WIDTH + column
    tl.store(target, stored.to(out.dtype.element_ty), mask=element_mask)


@triton.jit
def _store_latents(
    latent, rope_key, cache, slots, num_tokens, latent_stride, rope_key_stride, page_stride,
    PAGE_SIZE: tl.constexpr, LATENT_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROTARY_COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token_mask = token < num_tokens
    slot = tl.load(slots + token, mask=token_mask, other=0)
    row = cache + (slot // PAGE_SIZE) * page_stride
    row += (slot % PAGE_SIZE) * (LATENT_SIZE + ROTARY_SIZE)
    _copy_row(latent + token * latent_stride, row, token_mask, LATENT_SIZE, COLUMNS)
    rope_key += token * rope_key_stride
    _copy_row(rope_key, row + LATENT_SIZE, token_mask, ROTARY_SIZE, ROTARY_COLUMNS)


@triton.jit
def _copy_row(source, target, token_mask, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    for start in range(0, SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        element_mask = token_mask & (column < SIZE)
        tl.store(target + column, tl.load(source + column, mask=element_mask), mask=element_mask)


def stored_as(dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``Build`` options for a cache of ``dtype``; Triton reads no e4m3 before sm_89."""
    unsupported = {"sm_75", "sm_80"} if dtype == E4M3 else set[str]()
    return {"dims": {"cache_dtype": dtype_name(dtype)}, "without": frozenset(unsupported)}


_CACHE = (100, 16, 8, 128)
_SEQUENCES = ((INT64, 32, 64), (INT64, 32), (INT64, 32))  # page table, lengths, starts


def _write_arguments(dtype: torch.dtype, *scales: Any) -> Callable[..., Any]:
    key, cache = (BF16, 64, 8, 128), (dtype, *_CACHE)
    return given(key, key, cache, cache, (INT64, 64), *scales)


def _fp8_write_build(dtype: torch.dtype) -> Build:
    scale, name = (FP32, 8), dtype_name(dtype)
    return Build(
        "reshape_and_cache_fp8_triton",
        f"{name}, 8 heads of 128",
        _write_arguments(dtype, scale, scale, dtype),
        dims={"cache_dtype": name},
    )


BUILDS = (
    Build("reshape_and_cache_triton", "8 heads of 128", _write_arguments(BF16)),
    _fp8_write_build(E4M3),
    _fp8_write_build(E5M2),
    Build("gather_cache_triton", "8 heads of 128", given((BF16, *_CACHE), *_SEQUENCES, 2048)),
    Build(
        "gather_cache_triton",
        "float8_e4m3fn",
        given((E4M3, *_CACHE), *_SEQUENCES, 2048),
        "float8_e4m3fn",
    ),
    Build(
        "gather_cache_fp8_triton",
        "float8_e4m3fn, a scale of each head",
        given((E4M3, *_CACHE), *_SEQUENCES, (FP32, 8), 2048, BF16),
        **stored_as(E4M3),
    ),
    Build(
        "gather_cache_fp8_triton",
        "float8_e5m2, one scale",
        given((E5M2, *_CACHE), *_SEQUENCES, (FP32, 1), 2048, BF16),
        **stored_as(E5M2),
    ),
    Build(
        "write_latent_cache_triton",
        "512 + 64 wide",
        given((BF16, 64, 512), (BF16, 64, 64), (BF16, 4096, 64, 576), (INT64, 64)),
    ),
)
