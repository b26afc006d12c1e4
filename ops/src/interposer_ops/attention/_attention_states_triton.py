# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Joining attention to parts of the keys. T tokens, N heads, E size of a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import row_tile


@triton_kernel("merge_attention_states")
def merge_attention_states_triton(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``merge_attention_states``; the heads of all tokens are rows of one matrix."""
    num_tokens, num_heads, value_size = out_a.shape
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out, lse
    # Without elements of values there still is the logarithm.
    tile = row_tile("merge_attention_states", out.device, max(1, value_size))
    _merge[(tile.row_blocks(num_rows), max(1, tile.column_blocks(value_size)))](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        num_rows,
        out_a.stride(0),
        lse_a.stride(0),
        out_b.stride(0),
        lse_b.stride(0),
        NUM_HEADS=num_heads,
        VALUE_SIZE=value_size,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, lse


@triton.jit
def _merge(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_rows,
    out_a_stride,
    lse_a_stride,
    out_b_stride,
    lse_b_stride,
    NUM_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < num_rows
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    # Not converted: float32 or wider already, and so is what they are multiplied with.
    a = tl.load(lse_a + token * lse_a_stride + head, mask=there, other=0.0)
    b = tl.load(lse_b + token * lse_b_stride + head, mask=there, other=0.0)
    largest = tl.maximum(a, b)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a = tl.exp(a - largest)
    weight_b = tl.exp(b - largest)
    total = weight_a + weight_b  # 0 without keys, else at least 1
    if tl.program_id(1) == 0:
        tl.store(lse + row, largest + tl.log(total), mask=there)

    element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = there & (element < VALUE_SIZE)
    source = head * VALUE_SIZE + element
    side_a = tl.load(out_a + token * out_a_stride + source, mask=inside, other=0.0)
    side_b = tl.load(out_b + token * out_b_stride + source, mask=inside, other=0.0)
    mixed = weight_a * side_a.to(tl.float32) + weight_b * side_b.to(tl.float32)
    mixed = mixed / tl.maximum(total, 1.0)
    tl.store(out + row * VALUE_SIZE + element, mixed.to(out.dtype.element_ty), mask=inside)
