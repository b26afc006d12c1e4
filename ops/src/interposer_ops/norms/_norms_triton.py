# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Normalisation of rows. T rows, H width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from interposer_ops._triton.build import BF16, E4M3, FP16, FP32, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops._triton.small_floats import fp8_format, fp8_memory, quantized


@triton_kernel("rms_norm")
def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``rms_norm``; a row stays in registers where it fits a tile."""
    return _normalised("rms_norm", x, None, weight, eps)[0]


@triton_kernel("gemma_rms_norm")
def gemma_rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``gemma_rms_norm``."""
    return _normalised("rms_norm", x, None, weight, eps, plus_one=True)[0]


@triton_kernel("fused_add_rms_norm")
def fused_add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``fused_add_rms_norm``."""
    return _normalised("fused_add_rms_norm", x, residual, weight, eps)


@triton_kernel("fused_add_gemma_rms_norm")
def fused_add_gemma_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``fused_add_gemma_rms_norm``."""
    return _normalised("fused_add_rms_norm", x, residual, weight, eps, plus_one=True)


@triton_kernel("rms_norm_quantize_fp8")
def rms_norm_quantize_fp8_triton(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """Compute ``rms_norm_quantize_fp8``."""
    return _normalised("rms_norm_quantize", x, None, weight, eps, scale, out_dtype)[0]


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
        rows, weight, bias, y, num_rows, rows.stride(0), eps, WIDTH=width, **tile.options
    )
    return y


def _normalised(
    kernel: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised rows, and the sum that was normalised where there is a residual.

    Args:
        scale, out_dtype: of the 8-bit float that the rows are quantized to; None where they aren't.
    """
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    format_ = None if out_dtype is None else fp8_format(out_dtype)
    memory = total = y if format_ is None else fp8_memory(y)
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
        rows, stream, weight, scale, memory, total, num_rows, rows.stride(0),
        0 if stream is None else stream.stride(0), eps,
        None if format_ is None else format_.largest,
        WIDTH=width, PLUS_ONE=plus_one, FORMAT=format_, **tile.options,
    )  # fmt: skip
    return y, total


@triton.jit
def _rms_norm(
    x, residual, weight, divisor, y, total, num_rows, x_stride, residual_stride, eps, largest,
    WIDTH: tl.constexpr, PLUS_ONE: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    there = row < num_rows
    if divisor is not None:
        divisor = tl.load(divisor)
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
        _store(y + column, value * scale * factor, inside, divisor, largest, FORMAT)
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
            _store(y + place, value * scale * factor, inside, divisor, largest, FORMAT)


@triton.jit
def _store(target, value, inside, divisor, largest, FORMAT: tl.constexpr):
    dtype: tl.constexpr = target.dtype.element_ty
    if divisor is not None:
        code = quantized(value, divisor, 0.0, largest, dtype, FORMAT)
        tl.store(target, code, mask=inside)
    else:
        tl.store(target, value.to(dtype), mask=inside)


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
    x, weight, bias, y, num_rows, x_stride, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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


def _norm(dtype: torch.dtype, width: int) -> Callable[[], tuple[Any, ...]]:
    return given((dtype, 64, width), (dtype, width), 1e-6)


def _added_norm(width: int) -> Callable[[], tuple[Any, ...]]:
    return given((BF16, 64, width), (FP32, 64, width), (BF16, width), 1e-6)


def _quantized_norm(width: int) -> Build:
    arguments = given((BF16, 64, width), (BF16, width), (FP32, 1), 1e-6, E4M3)
    dims = {"out_dtype": "float8_e4m3fn"}
    label = f"float8_e4m3fn, {width} wide"
    return Build("rms_norm_quantize_fp8_triton", label, arguments, dims=dims)


BUILDS = (
    Build("rms_norm_triton", "bfloat16, 4096 wide", _norm(BF16, 4096)),
    Build("rms_norm_triton", "float32, 128 wide", _norm(FP32, 128), "float32"),
    Build("rms_norm_triton", "float16, 20000 wide", _norm(FP16, 20000), "float16"),
    Build("fused_add_rms_norm_triton", "4096 wide", _added_norm(4096)),
    Build("fused_add_rms_norm_triton", "18432 wide", _added_norm(18432)),
    Build("gemma_rms_norm_triton", "3584 wide", _norm(BF16, 3584)),
    Build("fused_add_gemma_rms_norm_triton", "3584 wide", _added_norm(3584)),
    Build("layer_norm_triton", "4096 wide", given((BF16, 64, 4096), *[(BF16, 4096)] * 2, 1e-5)),
    _quantized_norm(4096),
    _quantized_norm(14336),
)
