# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Quantizers with one scale for a whole tensor, given or found. H hidden size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import (
    BF16,
    E4M3,
    E4M3_FNUZ,
    E5M2,
    FP32,
    INT32,
    Build,
    dtype_name,
    given,
)
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.parameters import parameters_for, per_device
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops._triton.small_floats import Fp8Format, fp8_format, fp8_memory, quantized

_INT8 = Fp8Format(0, 0, False, 127.0)  # no float, and the kernel knows its range


@triton_kernel("quantize_fp8_static")
def quantize_fp8_static_triton(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute ``quantize_fp8_static``."""
    q = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if q.numel():
        _quantize(as_rows(x), fp8_memory(q), scale, None, None, fp8_format(out_dtype))
    return q


@triton_kernel("quantize_fp8_dynamic", batch_invariant=False)
def quantize_fp8_dynamic_triton(x: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_fp8_dynamic``.

    Programs of a first launch leave the peaks of their shares, of which there is a limited number;
    each program of the second one looks through all of these.
    """
    q = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if q.numel() == 0:
        return q, torch.ones(1, dtype=torch.float32, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    rows = as_rows(x)
    num_rows, width = rows.shape
    tile = row_tile("quantize_tensor", x.device, width)
    num_blocks = tile.row_blocks(num_rows) * tile.column_blocks(width)
    peaks = torch.empty(
        min(num_blocks, _most_shares(x.device)), dtype=torch.float32, device=x.device
    )
    _find_peaks[(peaks.shape[0],)](
        rows, peaks, num_rows, num_blocks, rows.stride(0), WIDTH=width, **tile.options
    )
    _quantize(rows, fp8_memory(q), scale, None, peaks, fp8_format(out_dtype))
    return q, scale


@triton_kernel("quantize_int8_static")
def quantize_int8_static_triton(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Compute ``quantize_int8_static``."""
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if q.numel():
        _quantize(as_rows(x), q, scale, zero_point, None, _INT8)
    return q


@per_device
def _most_shares(device: torch.device) -> int:
    return parameters_for("quantize_tensor", device).blocks["shares"]


def _quantize(
    rows: Tensor, q: Tensor, scale: Tensor, zero_point: Tensor | None,
    peaks: Tensor | None, format_: Fp8Format,
) -> None:  # fmt: skip
    num_rows, width = rows.shape
    tile = row_tile("quantize_tensor", rows.device, width)
    _quantize_elements[(tile.row_blocks(num_rows), tile.column_blocks(width))](
        rows, q, scale, zero_point, peaks, num_rows, 0 if peaks is None else peaks.shape[0],
        rows.stride(0), format_.largest,
        WIDTH=width, SHARES=_most_shares(rows.device), FORMAT=format_, **tile.options,
    )  # fmt: skip


@triton.jit
def _find_peaks(
    x, peaks, num_rows, num_blocks, x_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the largest magnitude in a program's share, which is every so-manieth block."""
    per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        row = ((block // per_row) * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        column = ((block % per_row) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < num_rows) & (column < WIDTH)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    tl.store(peaks + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit
def _quantize_elements(
    x, q, scale, zero_point, peaks, num_rows, num_peaks, x_stride, largest,
    WIDTH: tl.constexpr, SHARES: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize with the scale that is stored, or with the one that fits the peaks and store it."""
    if peaks is None:
        divisor = tl.load(scale)
    else:
        share = tl.arange(0, SHARES)
        peak = tl.max(tl.load(peaks + share, mask=share < num_peaks, other=0.0), axis=0)
        divisor = tl.where(peak > 0, tl.div_rn(peak, largest), 1.0)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale, divisor)
    offset = 0.0 if zero_point is None else tl.load(zero_point).to(tl.float32)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = q.dtype.element_ty
    code = quantized(value, divisor, offset, largest, dtype, FORMAT)
    tl.store(q + row * WIDTH + column, code, mask=inside)


def _fp8(kernel: str, dtype: torch.dtype, *scale: object) -> Build:
    name, arguments = dtype_name(dtype), given((BF16, 64, 4096), *scale, dtype)
    return Build(kernel, f"{name}, 4096 wide", arguments, dims={"out_dtype": name})


_SCALE = (FP32, 1)
BUILDS = (
    *(_fp8("quantize_fp8_static_triton", dtype, _SCALE) for dtype in (E4M3, E5M2, E4M3_FNUZ)),
    _fp8("quantize_fp8_dynamic_triton", E4M3),
    *(
        Build(
            "quantize_int8_static_triton",
            f"{width} wide",
            given((BF16, 64, width), _SCALE, (INT32, 1)),
        )
        for width in (4096, 14336)
    ),
)
