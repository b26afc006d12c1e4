# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels for MXFP8, MXFP4 and NVFP4: quantize, dequantize, and tile the block scales.

A byte holds two e2m1 elements, the first one in the low nibble.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.build import BF16, E4M3, FP32, UINT8, Build, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.float8_operands import decode
from interposer_ops._triton.rows import as_rows, row_tile
from interposer_ops._triton.small_floats import (
    clamped,
    divide,
    e2m1_codes,
    e2m1_numbers,
    fp8_codes,
    fp8_memory,
    to_fp8,
    unpack_codes,
)

_MX_BLOCK, _NV_BLOCK = 32, 16


@triton_kernel("quantize_mxfp8")
def quantize_mxfp8_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_mxfp8`` in Triton: 32 elements share a power-of-two scale."""
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = _allocate_scales(x, _MX_BLOCK, torch.uint8)
    _quantize(x, fp8_memory(q), scales, None, _MX_BLOCK, "mxfp8")
    return q, scales


@triton_kernel("quantize_mxfp4")
def quantize_mxfp4_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_mxfp4`` in Triton: 32 elements share a power-of-two scale."""
    q = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    scales = _allocate_scales(x, _MX_BLOCK, torch.uint8)
    _quantize(x, q.view(torch.int32), scales, None, _MX_BLOCK, "mxfp4")
    return q, scales


@triton_kernel("quantize_nvfp4")
def quantize_nvfp4_triton(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_nvfp4`` in Triton: 16 elements share an e4m3 scale."""
    q = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    scales = _allocate_scales(x, _NV_BLOCK, torch.float8_e4m3fn)
    # Scales are passed as bytes on every architecture: few of them, and the kernel decodes each one
    # again to divide by the rounded scale.
    _quantize(x, q.view(torch.int32), scales.view(torch.uint8), global_scale, _NV_BLOCK, "nvfp4")
    return q, scales


@triton_kernel("dequantize_mxfp4")
def dequantize_mxfp4_triton(packed: Tensor, scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute ``dequantize_mxfp4`` in Triton: e2m1 * 2^(scale - 127)."""
    return _launch_dequantize(packed, scales, None, out_dtype, _MX_BLOCK)


@triton_kernel("dequantize_nvfp4")
def dequantize_nvfp4_triton(
    packed: Tensor, scales: Tensor, global_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Compute ``dequantize_nvfp4`` in Triton: e2m1 * scale / global_scale."""
    return _launch_dequantize(packed, scales.view(torch.uint8), global_scale, out_dtype, _NV_BLOCK)


@triton_kernel("tile_scales", dtypes=("uint8", "float8_e4m3fn"))
def tile_scales_triton(scales: Tensor, rows_per_tile: int) -> Tensor:
    """Compute ``tile_scales`` in Triton: reorder block scales into tiles."""
    num_rows, num_columns = scales.shape
    tile_rows, tile_columns = -(-num_rows // rows_per_tile), -(-num_columns // 4)
    shape = (tile_rows, tile_columns, 4 * rows_per_tile)
    tiles = torch.empty(shape, dtype=scales.dtype, device=scales.device)
    if tiles.numel() == 0:
        return tiles
    tile = row_tile("tile_scales", scales.device, 4 * rows_per_tile)
    lanes = min(rows_per_tile, 32)
    _tile_scales[(tile.row_blocks(tile_rows * tile_columns),)](
        scales.view(torch.uint8), tiles.view(torch.uint8), num_rows, tile_rows * tile_columns,
        scales.stride(0), scales.stride(1),
        NUM_COLUMNS=num_columns, TILE_COLUMNS=tile_columns, ROWS_PER_TILE=rows_per_tile,
        LANES=lanes, TILES=tile.rows, **tile.compiled,
    )  # fmt: skip
    return tiles


def _allocate_scales(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    shape = (*x.shape[:-1], x.shape[-1] // block_size)
    return torch.empty(shape, dtype=dtype, device=x.device)


def _quantize(
    x: Tensor, q: Tensor, scales: Tensor, global_scale: Tensor | None,
    block_size: int, kind: str,
) -> None:  # fmt: skip
    if x.numel() == 0:
        return
    rows = as_rows(x)
    tile = row_tile("microscaling", x.device, block_size)
    _quantize_blocks[(tile.row_blocks(scales.numel()),)](
        rows, q, scales, global_scale, scales.numel(), rows.stride(0),
        PER_ROW=scales.shape[-1], KIND=kind, BLOCK=block_size, ROWS=tile.rows, **tile.compiled,
    )  # fmt: skip


def _launch_dequantize(
    codes: Tensor, scales: Tensor, global_scale: Tensor | None,
    out_dtype: torch.dtype, block_size: int,
) -> Tensor:  # fmt: skip
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    y = torch.empty(shape, dtype=out_dtype, device=codes.device)
    if y.numel() == 0:
        return y
    rows, row_scales = as_rows(codes), as_rows(scales)
    tile = row_tile("microscaling", codes.device, block_size)
    _dequantize_blocks[(tile.row_blocks(scales.numel()),)](
        rows, row_scales, global_scale, y, scales.numel(), rows.stride(0), row_scales.stride(0),
        PER_ROW=scales.shape[-1], BLOCK=block_size, ROWS=tile.rows, **tile.compiled,
    )  # fmt: skip
    return y


@triton.jit
def _quantize_blocks(
    x, q, scales, global_scale, num_blocks, x_stride,
    PER_ROW: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize blocks of rows into dense elements and scales; ``ROWS`` blocks per program."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    block_mask = block < num_blocks
    x += (block // PER_ROW) * x_stride + (block % PER_ROW) * BLOCK
    if KIND == "mxfp8":
        column = tl.arange(0, BLOCK)[None, :]
        value = tl.load(x + column, mask=block_mask, other=0.0).to(tl.float32)
        peak = tl.max(tl.abs(value), axis=1, keep_dims=True)
        scale, factor = _mx_scale(peak, 8)
        code = to_fp8(clamped(value * factor, 448.0), q.dtype.element_ty, 3, 7, False)
        tl.store(q + block * BLOCK + column, code, mask=block_mask)
    else:
        # One thread loads eight elements and packs them into one 32-bit word.
        word = tl.arange(0, BLOCK // 8)[None, :]
        nibble = tl.arange(0, 8)[None, None, :]
        pointer = (x + 8 * word)[:, :, None] + nibble
        value = tl.load(pointer, mask=block_mask[:, :, None], other=0.0).to(tl.float32)
        peak = tl.max(tl.max(tl.abs(value), axis=2), axis=1, keep_dims=True)
        if KIND == "mxfp4":
            scale, factor = _mx_scale(peak, 2)
            quotient = value * factor[:, :, None]
        else:
            tensor_scale = tl.load(global_scale)
            scale, divisor = _nv_scale(peak, tensor_scale)
            quotient = divide(value * tensor_scale, divisor[:, :, None])
        code = tl.sum(e2m1_codes(quotient) << (4 * nibble), axis=2)
        tl.store(q + block * (BLOCK // 8) + word, code, mask=block_mask)
    tl.store(scales + block, scale, mask=block_mask)


@triton.jit
def _mx_scale(peak, LARGEST_EXPONENT: tl.constexpr):
    """Return the MX block scale 2^e as a biased uint8 exponent, and 2^-e in float32."""
    # The biased float32 exponent of the peak: 0 for zero and subnormal numbers.
    exponent = (peak.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.maximum(exponent - LARGEST_EXPONENT, 0)
    # Exact and never subnormal, since the biased exponent is at most 252.
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return exponent.to(tl.uint8), factor


@triton.jit
def _nv_scale(peak, global_scale):
    """Return the NVFP4 block scale as an e4m3 code, and the float32 divisor of the elements."""
    code = fp8_codes(tl.minimum(divide(peak * global_scale, 6.0), 448.0), 3, 7, False)
    rounded_scale = decode(code, "e4m3").to(tl.float32)
    # If the scale rounds to zero, division by infinity yields zeros with the signs of x.
    return code, tl.where(rounded_scale > 0, rounded_scale, float("inf"))


@triton.jit
def _dequantize_blocks(
    codes, scales, global_scale, y, num_blocks, codes_stride, scales_stride,
    PER_ROW: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Dequantize ``ROWS`` blocks; scales are e8m0, or e4m3 if there is a global scale."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    block_mask = block < num_blocks
    row, number = block // PER_ROW, block % PER_ROW
    pair = tl.arange(0, BLOCK // 2)[None, :]
    source = codes + row * codes_stride + number * (BLOCK // 2)
    element = e2m1_numbers(
        unpack_codes(tl.load(source + pair, mask=block_mask, other=0), ROWS, BLOCK)
    )
    code = tl.load(scales + row * scales_stride + number, mask=block_mask, other=0)
    if global_scale is not None:
        scale = divide(decode(code, "e4m3").to(tl.float32), tl.load(global_scale))
    else:
        exponent = code.to(tl.int32)
        # Code 0 is 2^-127, which is subnormal in float32.
        bits = tl.where(exponent == 0, 0x400000, exponent << 23)
        scale = tl.where(exponent == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(y + block * BLOCK + column, (element * scale).to(y.dtype.element_ty), mask=block_mask)


@triton.jit
def _tile_scales(
    scales, tiles, num_rows, num_tiles, row_stride, column_stride,
    NUM_COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ROWS_PER_TILE: tl.constexpr,
    LANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Gather the scales of ``TILES`` tiles, with zeros outside the matrix."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)[:, None]
    position = tl.arange(0, 4 * ROWS_PER_TILE)[None, :]
    groups: tl.constexpr = ROWS_PER_TILE // LANES
    row_in_tile = (position // 4) % groups * LANES + position // (4 * groups)
    row = tile // TILE_COLUMNS * ROWS_PER_TILE + row_in_tile
    column = tile % TILE_COLUMNS * 4 + position % 4
    inside = (row < num_rows) & (column < NUM_COLUMNS)
    source = scales + row * row_stride + column * column_stride
    value = tl.load(source, mask=inside, other=0)
    tl.store(tiles + tile * (4 * ROWS_PER_TILE) + position, value, mask=tile < num_tiles)


_SCALE = (FP32, 1)
BUILDS = (
    *(
        Build(f"quantize_{format_}_triton", f"{width} wide", given((BF16, 64, width), *scales))
        for format_, *scales in (("mxfp8",), ("mxfp4",), ("nvfp4", _SCALE))
        for width in (4096, 14336)
    ),
    *(
        Build(f"dequantize_{format_}_triton", "4096 wide", given((UINT8, 64, 2048), *scales, BF16))
        for format_, *scales in (
            ("mxfp4", (UINT8, 64, 4096 // _MX_BLOCK)),
            ("nvfp4", (E4M3, 64, 4096 // _NV_BLOCK), _SCALE),
        )
    ),
    *(
        Build(
            "tile_scales_triton",
            f"{rows}x4",
            given((UINT8, 64, 128), rows),
            "uint8",
            {"rows_per_tile": rows},
        )
        for rows in (128, 8)
    ),
)
