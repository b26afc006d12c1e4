# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Normalisation of rows. T rows, H width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile


@triton_kernel("rms_norm")
def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``rms_norm``; a row stays in registers where it fits a tile."""
    return _normalised("rms_norm", x, None, weight, eps, False)[0]


@triton_kernel("gemma_rms_norm")
def gemma_rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``gemma_rms_norm``."""
    return _normalised("rms_norm", x, None, weight, eps, True)[0]


@triton_kernel("fused_add_rms_norm")
def fused_add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``fused_add_rms_norm``."""
    return _normalised("fused_add_rms_norm", x, residual, weight, eps, False)


@triton_kernel("fused_add_gemma_rms_norm")
def fused_add_gemma_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``fused_add_gemma_rms_norm``."""
    return _normalised("fused_add_rms_norm", x, residual, weight, eps, True)


@triton_kernel("layer_norm")
def layer_norm_triton(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute ``layer_norm``: the mean first, then the variance of what is left."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    num_rows, width = rows.shape
    tile = row_tile("layer_norm", x.device, width)
    _layer_norm[(tile.row_blocks(num_rows),)](
        rows,
        weight,
        bias,
        y,
        num_rows,
        rows.stride(0),
        eps,
        WIDTH=width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def _normalised(
    kernel: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised rows, and the sum that was normalised where there is a residual."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y
    if residual is not None:
        dtype = torch.promote_types(x.dtype, residual.dtype)
        total = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y, total
    rows = as_rows(x)
    stream = None if residual is None else as_rows(residual)
    num_rows, width = rows.shape
    tile = row_tile(kernel, x.device, width)
    _rms_norm[(tile.row_blocks(num_rows),)](
        rows,
        stream,
        weight,
        y,
        total,
        num_rows,
        rows.stride(0),
        0 if stream is None else stream.stride(0),
        eps,
        WIDTH=width,
        PLUS_ONE=plus_one,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y, total


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    y,
    total,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    there = row < num_rows
    x += row * x_stride
    y += row * WIDTH
    if residual is not None:
        residual += row * residual_stride
        total += row * WIDTH
    if COLUMNS >= WIDTH:
        inside = there & (column < WIDTH)
        value = _sum(x, residual, total, column, inside)
        if residual is not None:
            tl.store(total + column, value.to(total.dtype.element_ty), mask=inside)
        square = tl.sum(value * value, axis=1, keep_dims=True)
        factor = _weight(weight, column, column < WIDTH, PLUS_ONE)
        scale = tl.rsqrt(square * (1.0 / WIDTH) + eps)
        tl.store(y + column, (value * scale * factor).to(y.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, COLUMNS):
            place = start + column
            inside = there & (place < WIDTH)
            value = _sum(x, residual, total, place, inside)
            if residual is not None:
                tl.store(total + place, value.to(total.dtype.element_ty), mask=inside)
            squares += value * value
        square = tl.sum(squares, axis=1, keep_dims=True)
        scale = tl.rsqrt(square * (1.0 / WIDTH) + eps)
        for start in range(0, WIDTH, COLUMNS):
            place = start + column
            inside = there & (place < WIDTH)
            # Added again: what this program has just stored, another of its threads may hold.
            value = _sum(x, residual, total, place, inside)
            factor = _weight(weight, place, place < WIDTH, PLUS_ONE)
            tl.store(y + place, (value * scale * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sum(x, residual, total, column, inside):
    """Return x plus residual, rounded to the dtype that the sum is stored in."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _weight(weight, column, inside, PLUS_ONE: tl.constexpr):
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    return factor


@triton.jit
def _layer_norm(
    x,
    weight,
    bias,
    y,
    num_rows,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    there = row < num_rows
    x += row * x_stride
    y += row * WIDTH
    if COLUMNS >= WIDTH:
        inside = there & (column < WIDTH)
        value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(value, axis=1, keep_dims=True) * (1.0 / WIDTH)
        centred = tl.where(inside, value - mean, 0.0)
        variance = tl.sum(centred * centred, axis=1, keep_dims=True) * (1.0 / WIDTH)
        result = _affine(centred * tl.rsqrt(variance + eps), weight, bias, column, column < WIDTH)
        tl.store(y + column, result.to(y.dtype.element_ty), mask=inside)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, COLUMNS):
            place = start + column
            inside = there & (place < WIDTH)
            sums += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(sums, axis=1, keep_dims=True) * (1.0 / WIDTH)
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, COLUMNS):
            place = start + column
            inside = there & (place < WIDTH)
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            centred = tl.where(inside, value - mean, 0.0)
            squares += centred * centred
        variance = tl.sum(squares, axis=1, keep_dims=True) * (1.0 / WIDTH)
        scale = tl.rsqrt(variance + eps)
        for start in range(0, WIDTH, COLUMNS):
            place = start + column
            inside = there & (place < WIDTH)
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            result = _affine((value - mean) * scale, weight, bias, place, place < WIDTH)
            tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _affine(value, weight, bias, column, inside):
    if weight is not None:
        value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return value
