# mypy: disable-error-code="no-untyped-def"
"""Writing to a paged cache. T tokens, K kv heads, D head size, P pages, S page size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interposer_ops.triton.rows import row_tile

__all__ = ["reshape_and_cache", "reshape_and_cache_fp8"]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Compute ``reshape_and_cache``."""
    _store(key, value, key_cache, value_cache, slots, None, None, 0.0)


def reshape_and_cache_fp8(
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
    largest = torch.finfo(cache_dtype).max
    _store(key, value, key_cache, value_cache, slots, key_scale, value_scale, largest)


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    largest: float,
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
        largest,
        num_tokens,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
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
    slot = tl.load(slots + token, mask=there, other=0)
    target = (slot % PAGE_SIZE) * (NUM_HEADS * HEAD_SIZE) + source
    k_target = key_cache + (slot // PAGE_SIZE) * key_page_stride + target
    v_target = value_cache + (slot // PAGE_SIZE) * value_page_stride + target
    tl.store(k_target, k.to(key_cache.dtype.element_ty), mask=inside)
    tl.store(v_target, v.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(x, scale, head, there, largest, PER_HEAD: tl.constexpr):
    divisor = tl.load(scale + head, mask=there, other=1.0) if PER_HEAD else tl.load(scale)
    wide = x.to(tl.float32)
    quotient = tl.div_rn(wide, tl.zeros_like(wide) + divisor)
    # Comparisons that a NaN fails leave it in its place.
    return tl.where(quotient > largest, largest, tl.where(quotient < -largest, -largest, quotient))
