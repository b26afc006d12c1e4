# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Writing to the latent cache. T tokens, C latent size, R rotary size, P pages, S page size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import row_tile


@triton_kernel("write_latent_cache")
def write_latent_cache_triton(
    latent: torch.Tensor, rope_key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Compute ``write_latent_cache``: the bits of both parts are copied as they are."""
    num_tokens, latent_size = latent.shape
    rotary_size = rope_key.shape[1]
    if num_tokens == 0 or latent_size + rotary_size == 0:
        return
    tile = row_tile("write_latent_cache", latent.device, max(1, latent_size))
    _store[(tile.row_blocks(num_tokens),)](
        latent,
        rope_key,
        cache,
        slots,
        num_tokens,
        latent.stride(0),
        rope_key.stride(0),
        cache.stride(0),
        PAGE_SIZE=cache.shape[1],
        LATENT_SIZE=latent_size,
        ROTARY_SIZE=rotary_size,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        ROTARY_COLUMNS=min(tile.columns, triton.next_power_of_2(max(1, rotary_size))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _store(
    latent,
    rope_key,
    cache,
    slots,
    num_tokens,
    latent_stride,
    rope_key_stride,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    LATENT_SIZE: tl.constexpr,
    ROTARY_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY_COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = token < num_tokens
    slot = tl.load(slots + token, mask=there, other=0)
    row = cache + (slot // PAGE_SIZE) * page_stride
    row += (slot % PAGE_SIZE) * (LATENT_SIZE + ROTARY_SIZE)
    _copy(latent + token * latent_stride, row, there, LATENT_SIZE, COLUMNS)
    rope_key += token * rope_key_stride
    _copy(rope_key, row + LATENT_SIZE, there, ROTARY_SIZE, ROTARY_COLUMNS)


@triton.jit
def _copy(source, target, there, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    for start in range(0, SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = there & (column < SIZE)
        tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)
