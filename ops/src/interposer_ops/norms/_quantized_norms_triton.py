# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Normalisation whose result is quantized at once. H width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rounding import quantized
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops._triton.small_floats import fp8_format, fp8_memory


@triton_kernel("rms_norm_quantize_fp8")
def rms_norm_quantize_fp8_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``rms_norm_quantize_fp8``; a row stays in registers where it fits a tile."""
    q = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if q.numel() == 0:
        return q
    rows = as_rows(x)
    num_rows, width = rows.shape
    tile = row_tile("rms_norm_quantize", x.device, width)
    format_ = fp8_format(out_dtype)
    _rms_norm_quantize[(tile.row_blocks(num_rows),)](
        rows,
        weight,
        scale,
        fp8_memory(q),
        num_rows,
        rows.stride(0),
        eps,
        format_.largest,
        WIDTH=width,
        MANTISSA=format_.mantissa,
        BIAS=format_.bias,
        UNSIGNED_ZERO=format_.unsigned_zero,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return q


@triton.jit
def _rms_norm_quantize(
    x,
    weight,
    scale,
    q,
    num_rows,
    x_stride,
    eps,
    largest,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    UNSIGNED_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    there = row < num_rows
    divisor = tl.load(scale)
    dtype: tl.constexpr = q.dtype.element_ty
    x += row * x_stride
    q += row * WIDTH
    if COLUMNS >= WIDTH:
        inside = there & (column < WIDTH)
        value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(value * value, axis=1, keep_dims=True)
        factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        y = value * tl.rsqrt(square * (1.0 / WIDTH) + eps) * factor
        code = quantized(y, divisor, 0.0, largest, dtype, MANTISSA, BIAS, UNSIGNED_ZERO)
        tl.store(q + column, code, mask=inside)
    else:
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, COLUMNS):
            inside = there & (start + column < WIDTH)
            value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
            squares += value * value
        square = tl.sum(squares, axis=1, keep_dims=True)
        normaliser = tl.rsqrt(square * (1.0 / WIDTH) + eps)
        for start in range(0, WIDTH, COLUMNS):
            place = start + column
            inside = there & (place < WIDTH)
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(weight + place, mask=place < WIDTH, other=0.0).to(tl.float32)
            y = value * normaliser * factor
            code = quantized(y, divisor, 0.0, largest, dtype, MANTISSA, BIAS, UNSIGNED_ZERO)
            tl.store(q + place, code, mask=inside)
