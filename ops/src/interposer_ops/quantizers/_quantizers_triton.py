# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels that quantize to fp8 and int8, by static or dynamic scales.

H hidden size, B block size.
"""

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
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops._triton.small_floats import (
    Fp8Format,
    divide,
    fp8_format,
    fp8_memory,
    quantize,
    round_half_even,
)

_INT8 = Fp8Format(0, 0, False, 127.0)  # not a float: kernels for int8 read only ``largest``


@triton_kernel("quantize_fp8_per_token")
def quantize_fp8_per_token_triton(
    x: Tensor, out_dtype: torch.dtype, scale_limit: float | None
) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_fp8_per_token`` in Triton: one dynamic scale per row."""
    return _quantize_fp8(x, x.shape[-1], out_dtype, scale_limit, False)


@triton_kernel("quantize_fp8_blocks")
def quantize_fp8_blocks_triton(
    x: Tensor, block_size: int, out_dtype: torch.dtype, power_of_two_scales: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_fp8_blocks`` in Triton: one dynamic scale per block of a row."""
    return _quantize_fp8(x, block_size, out_dtype, None, power_of_two_scales)


@triton_kernel("quantize_int8_per_token")
def quantize_int8_per_token_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_int8_per_token`` in Triton: one dynamic scale per row."""
    return _quantize_int8(x, None)


@triton_kernel("quantize_int8_per_token_asymmetric")
def quantize_int8_per_token_asymmetric_triton(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``quantize_int8_per_token_asymmetric`` in Triton: scale and zero point per row."""
    zero_points = torch.empty((*x.shape[:-1], 1), dtype=torch.int32, device=x.device)
    return *_quantize_int8(x, zero_points), zero_points


def _quantize_fp8(
    x: Tensor, block_size: int, out_dtype: torch.dtype, scale_limit: float | None,
    power_of_two_scales: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_blocks = -(-x.shape[-1] // max(block_size, 1))
    q = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    scales = torch.empty((*x.shape[:-1], num_blocks), dtype=torch.float32, device=x.device)
    if x.numel():
        format_ = fp8_format(out_dtype)
        memory = fp8_memory(q)
        _launch_blocks(
            x, memory, scales, None, block_size, scale_limit, format_, power_of_two_scales
        )
    return q, scales


def _quantize_int8(x: Tensor, zero_points: Tensor | None) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if x.numel():
        _launch_blocks(x, q, scales, zero_points, x.shape[-1], None, _INT8, False)
    return q, scales


def _launch_blocks(
    x: Tensor, q: Tensor, scales: Tensor, zero_points: Tensor | None,
    block_size: int, scale_limit: float | None, format_: Fp8Format, power_of_two_scales: bool,
) -> None:  # fmt: skip
    rows = as_rows(x)
    num_rows, width = rows.shape
    per_row = scales.shape[-1]
    block_size = min(block_size, width)
    tile = row_tile("quantize", x.device, block_size)
    _quantize_blocks[(tile.row_blocks(num_rows * per_row),)](
        rows, q, scales, zero_points, num_rows * per_row, rows.stride(0), scale_limit,
        format_.largest,
        WIDTH=width, BLOCK=block_size, PER_ROW=per_row, POWER_OF_TWO=power_of_two_scales,
        FORMAT=format_, **tile.options,
    )  # fmt: skip


@triton.jit
def _quantize_blocks(
    x, q, scales, zero_points, num_blocks, x_stride, scale_limit, largest,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PER_ROW: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize blocks of rows; each program handles ``ROWS`` blocks."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    block_mask = block < num_blocks
    first = (block % PER_ROW) * BLOCK
    size = tl.minimum(WIDTH - first, BLOCK)
    column = tl.arange(0, COLUMNS)[None, :]
    dtype: tl.constexpr = q.dtype.element_ty
    x += (block // PER_ROW) * x_stride + first
    q += (block // PER_ROW) * WIDTH + first
    # Masked elements load as 0: a 0 changes no peak, and every asymmetric range includes 0.
    if COLUMNS >= BLOCK:
        inside = block_mask & (column < size)
        value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        magnitude = tl.abs(value) if zero_points is None else value
        low = tl.min(magnitude, axis=1, keep_dims=True)
        high = tl.max(magnitude, axis=1, keep_dims=True)
        scale, zero_point = _scale(low, high, zero_points, scale_limit, largest, POWER_OF_TWO)
        code = quantize(value, scale, zero_point, largest, dtype, FORMAT)
        tl.store(q + column, code, mask=inside)
    else:
        lows = tl.zeros([ROWS, COLUMNS], tl.float32)
        highs = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, BLOCK, COLUMNS):
            position = start + column
            value = tl.load(x + position, mask=block_mask & (position < size), other=0.0).to(
                tl.float32
            )
            magnitude = tl.abs(value) if zero_points is None else value
            lows = tl.minimum(lows, magnitude)
            highs = tl.maximum(highs, magnitude)
        low = tl.min(lows, axis=1, keep_dims=True)
        high = tl.max(highs, axis=1, keep_dims=True)
        scale, zero_point = _scale(low, high, zero_points, scale_limit, largest, POWER_OF_TWO)
        for start in range(0, BLOCK, COLUMNS):
            position = start + column
            inside = block_mask & (position < size)
            value = tl.load(x + position, mask=inside, other=0.0).to(tl.float32)
            code = quantize(value, scale, zero_point, largest, dtype, FORMAT)
            tl.store(q + position, code, mask=inside)
    tl.store(scales + block, scale, mask=block_mask)
    if zero_points is not None:
        tl.store(zero_points + block, zero_point.to(tl.int32), mask=block_mask)


@triton.jit
def _scale(low, high, zero_points, scale_limit, largest, POWER_OF_TWO: tl.constexpr):
    """Return the float32 scales and zero points of blocks from their minima and maxima."""
    zero_point = tl.zeros_like(high)
    if zero_points is None:
        scale = tl.where(high > 0, divide(high, largest), 1.0)
        if POWER_OF_TWO:
            scale = _round_up_to_power_of_two(scale)
        if scale_limit is not None:
            scale = tl.minimum(scale, scale_limit)
    else:
        low = tl.minimum(low, 0.0)
        high = tl.maximum(high, 0.0)
        scale = tl.where(high > low, divide(high - low, 255.0), 1.0)
        zero_point = round_half_even(-128.0 - tl.div_rn(low, scale))
    return scale, zero_point


@triton.jit
def _round_up_to_power_of_two(scale):
    """Round ``scale`` up to a power of two; a scale of zero becomes 1."""
    bits = scale.to(tl.int32, bitcast=True)
    # Adding all mantissa bits carries into the exponent unless the mantissa is 0.
    raised = (bits + 0x7FFFFF) & 0x7F800000
    # The bits of a subnormal number are an integer multiple of 2^-149; round that integer up.
    multiple = bits.to(tl.float32).to(tl.int32, bitcast=True)
    multiple = ((multiple + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True).to(tl.int32)
    raised = tl.where(bits < 0x800000, multiple, raised)
    return tl.where(bits == 0, 1.0, raised.to(tl.float32, bitcast=True))


@triton_kernel("quantize_fp8_static")
def quantize_fp8_static_triton(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute ``quantize_fp8_static`` in Triton: one given scale for all rows."""
    q = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if q.numel():
        _launch_elements(as_rows(x), fp8_memory(q), scale, None, fp8_format(out_dtype))
    return q


@triton_kernel("quantize_int8_static")
def quantize_int8_static_triton(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Compute ``quantize_int8_static`` in Triton: a given scale and zero point for all rows."""
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if q.numel():
        _launch_elements(as_rows(x), q, scale, zero_point, _INT8)
    return q


def _launch_elements(
    rows: Tensor, q: Tensor, scale: Tensor, zero_point: Tensor | None, format_: Fp8Format
) -> None:  # fmt: skip
    num_rows, width = rows.shape
    tile = row_tile("quantize_tensor", rows.device, width)
    _quantize_elements[(tile.row_blocks(num_rows), tile.column_blocks(width))](
        rows, q, scale, zero_point, num_rows, rows.stride(0), format_.largest,
        WIDTH=width, FORMAT=format_, **tile.options,
    )  # fmt: skip


@triton.jit
def _quantize_elements(
    x, q, scale, zero_point, num_rows, x_stride, largest,
    WIDTH: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    divisor = tl.load(scale)
    offset = 0.0 if zero_point is None else tl.load(zero_point).to(tl.float32)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = q.dtype.element_ty
    code = quantize(value, divisor, offset, largest, dtype, FORMAT)
    tl.store(q + row * WIDTH + column, code, mask=inside)


def _fp8(op: str, dtype: torch.dtype, x: tuple[object, ...], *arguments_after_x: object) -> Build:
    name = dtype_name(dtype)
    label, arguments = f"{name}, {x[-1]} wide", given(x, *arguments_after_x)
    return Build(f"{op}_triton", label, arguments, dims={"out_dtype": name})


_SCALE, _ROWS, _WIDE = (FP32, 1), (BF16, 64, 4096), (BF16, 64, 14336)
BUILDS = (
    _fp8("quantize_fp8_per_token", E4M3, _ROWS, E4M3, None),
    _fp8("quantize_fp8_per_token", E4M3, _WIDE, E4M3, 1.0),
    *(_fp8("quantize_fp8_static", to, _ROWS, _SCALE, to) for to in (E4M3, E5M2, E4M3_FNUZ)),
    Build("quantize_fp8_blocks_triton", "128 of 4096", given(_ROWS, 128, E4M3, False)),
    Build("quantize_fp8_blocks_triton", "128 of 14336", given(_WIDE, 128, E4M3, True)),
    *(
        Build(f"quantize_int8_{scales}_triton", f"{x[-1]} wide", given(x, *arguments_after_x))
        for scales, *arguments_after_x in (
            ("per_token",),
            ("per_token_asymmetric",),
            ("static", _SCALE, (INT32, 1)),
        )
        for x in (_ROWS, _WIDE)
    ),
)
