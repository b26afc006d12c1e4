# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton linear layers of MXFP4, MXFP8 and NVFP4.

Every element times its scale fits bfloat16 exactly. On every architecture, tiles are dequantized in
registers without error and multiplied as bfloat16.

T rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer import Dims
from interposer_ops._triton.build import BF16, E4M3, FP16, FP32, UINT8, Build, dtype_name, given
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.float8_operands import decode
from interposer_ops._triton.rows import as_rows
from interposer_ops._triton.small_floats import unpack_codes
from interposer_ops.quantized_linear._linear_tiles_triton import (
    STEPS,
    linear_tile,
    store_tile,
    tile_position,
)


@triton_kernel("mxfp4_linear", judge="judge_operands", batch_invariant=False)
def mxfp4_linear_triton(
    x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute ``mxfp4_linear``; with float16 inputs, the sum of each block is scaled instead."""
    return _launch_linear("mxfp4_linear", x, None, weight, weight_scales, None, bias, x.dtype)


@triton_kernel("mxfp8_linear", judge="judge_operands", batch_invariant=False)
def mxfp8_linear_triton(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``mxfp8_linear`` in Triton: MXFP8 inputs times an MXFP8 weight."""
    codes = x.view(torch.uint8), x_scales, weight.view(torch.uint8), weight_scales
    return _launch_linear("mxfp8_linear", *codes, None, bias, out_dtype)


@triton_kernel("nvfp4_linear", judge="judge_operands", batch_invariant=False)
def nvfp4_linear_triton(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor,
    alpha: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``nvfp4_linear`` in Triton: NVFP4 inputs times an NVFP4 weight."""
    codes = x, x_scales.view(torch.uint8), weight, weight_scales.view(torch.uint8)
    return _launch_linear("nvfp4_linear", *codes, alpha, bias, out_dtype)


def _launch_linear(
    kernel: str, x: Tensor, x_scales: Tensor | None, weight: Tensor,
    weight_scales: Tensor, alpha: Tensor | None, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Launch the kernel; tensors of dtypes that triton lacks are passed as uint8."""
    elements, scales, block = _FORMATS[kernel]
    out_features, num_blocks = weight_scales.shape
    y = torch.empty((*x.shape[:-1], out_features), dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    row_scales = None if x_scales is None else as_rows(x_scales)
    num_rows = rows.shape[0]
    # Scales exceed the range of float16: multiply the sum of a block by the scale in float32.
    late = x.dtype == torch.float16
    # The smallest tile leaves registers for the sum of a block, or for float32 operands, which
    # many GPUs multiply without matrix instructions.
    small = late or x.dtype == torch.float32
    tile = linear_tile(kernel, x.device, 1 if small else num_rows)
    tile = tile._replace(inputs=block) if small else tile
    _microscaled[(tile.num_programs(num_rows, out_features),)](
        rows, row_scales, weight, weight_scales, alpha, bias, y, num_rows, rows.stride(0),
        0 if row_scales is None else row_scales.stride(0),
        INPUTS=num_blocks * block, OUTPUTS=out_features, ELEMENTS=elements, SCALES=scales,
        BLOCK=block, LATE=late, **tile.options,
    )  # fmt: skip
    return y


# Format of the elements, format of the scales, elements per scale.
_FORMATS = {
    "mxfp4_linear": ("e2m1", "e8m0", 32),
    "mxfp8_linear": ("e4m3", "e8m0", 32),
    "nvfp4_linear": ("e2m1", "e4m3", 16),
}


@triton.jit(do_not_specialize=["num_rows"])
def _microscaled(
    x, x_scales, weight, weight_scales, alpha, bias, y, num_rows, x_stride, x_scale_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ELEMENTS: tl.constexpr, SCALES: tl.constexpr,
    BLOCK: tl.constexpr, LATE: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, output = tile_position(num_rows, OUTPUTS, ROW_TILE, OUTPUT_TILE, GROUP)
    # Rows and outputs past the end read row or output 0 instead and are not stored.
    safe_row = tl.where(row < num_rows, row, 0)
    safe_output = tl.where(output < OUTPUTS, output, 0).to(tl.int64)
    num_blocks: tl.constexpr = INPUTS // BLOCK
    per_byte: tl.constexpr = 2 if ELEMENTS == "e2m1" else 1
    x += safe_row * x_stride
    weight += safe_output * (INPUTS // per_byte)
    weight_scales += safe_output * num_blocks
    if x_scales is not None:
        x_scales += safe_row * x_scale_stride
    total = tl.zeros([ROW_TILE, OUTPUT_TILE], tl.float32)
    for start in range(0, INPUTS, STEP):
        b = _elements(weight, start, ELEMENTS, OUTPUT_TILE, INPUTS, STEP)
        scale = _scales(weight_scales, start // BLOCK, SCALES, num_blocks, STEP // BLOCK)
        if x_scales is not None:
            a = _elements(x, start, ELEMENTS, ROW_TILE, INPUTS, STEP)
            x_scale = _scales(x_scales, start // BLOCK, SCALES, num_blocks, STEP // BLOCK)
            a = _scale_blocks(a, x_scale, ROW_TILE, STEP, BLOCK).to(tl.bfloat16)
        else:
            column = start + tl.arange(0, STEP)[None, :]
            a = tl.load(x[:, None] + column, mask=column < INPUTS, other=0.0)
        if LATE:
            part = tl.dot(a, tl.trans(b.to(a.dtype)), input_precision="ieee")
            total += part * tl.trans(scale)
        else:
            b = _scale_blocks(b, scale, OUTPUT_TILE, STEP, BLOCK)
            total = tl.dot(a, tl.trans(b.to(a.dtype)), total, input_precision="ieee")
    if alpha is not None:
        total *= tl.load(alpha)
    store_tile(total, bias, y, row, output, safe_output, num_rows, OUTPUTS)


@triton.jit
def _elements(
    rows, start, FORMAT: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, STEP: tl.constexpr
):
    """Load ``[ROWS, STEP]`` elements as float16, with zeros past the last input."""
    if FORMAT == "e2m1":
        byte = start // 2 + tl.arange(0, STEP // 2)[None, :]
        pairs = tl.load(rows[:, None] + byte, mask=byte < INPUTS // 2, other=0)
        code = unpack_codes(pairs, ROWS, STEP).to(tl.int16)
        # Move the bits to their places in float16; 2^(15 - 1) corrects the exponent bias.
        float16_bits = (code & 7) << 9 | (code & 8) << 12
        numbers = float16_bits.to(tl.float16, bitcast=True) * 16384.0
    else:
        tl.static_assert(FORMAT == "e4m3")
        column = start + tl.arange(0, STEP)[None, :]
        code = tl.load(rows[:, None] + column, mask=column < INPUTS, other=0)
        numbers = decode(code, FORMAT)
    return numbers


@triton.jit
def _scales(rows, first, FORMAT: tl.constexpr, NUM_BLOCKS: tl.constexpr, COUNT: tl.constexpr):
    """Load ``[ROWS, COUNT]`` scales as float32, with finite numbers past the last block."""
    block = first + tl.arange(0, COUNT)[None, :]
    code = tl.load(rows[:, None] + block, mask=block < NUM_BLOCKS, other=0)
    if FORMAT == "e8m0":
        wide = code.to(tl.int32)
        # Code 0 is 2^-127, which is subnormal in float32; code 255 is NaN.
        bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
        scale = bits.to(tl.float32, bitcast=True)
    else:
        tl.static_assert(FORMAT == "e4m3")
        scale = decode(code, "e4m3").to(tl.float32)
    return scale


@triton.jit
def _scale_blocks(numbers, scales, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply ``[ROWS, STEP]`` numbers by the scales of their blocks."""
    blocks = tl.reshape(numbers.to(tl.float32), (ROWS, STEP // BLOCK, BLOCK))
    return tl.reshape(blocks * scales[:, :, None], (ROWS, STEP))


def _mxfp4(label: str, tokens: int, outputs: int, dtype: torch.dtype = BF16) -> Build:
    weight = (UINT8, outputs, 2048), (UINT8, outputs, 128)
    arguments = given((dtype, tokens, 4096), *weight, (dtype, outputs))
    return _build("mxfp4_linear_triton", label, outputs, arguments, dtype_name(dtype))


def _mxfp8(label: str, tokens: int, outputs: int) -> Build:
    x, weight = (((E4M3, rows, 4096), (UINT8, rows, 128)) for rows in (tokens, outputs))
    return _build("mxfp8_linear_triton", label, outputs, given(*x, *weight, None, BF16))


def _nvfp4(label: str, tokens: int, outputs: int) -> Build:
    x, weight = (((UINT8, rows, 2048), (E4M3, rows, 256)) for rows in (tokens, outputs))
    return _build("nvfp4_linear_triton", label, outputs, given(*x, *weight, (FP32, 1), None, BF16))


def _build(
    kernel: str, label: str, outputs: int, arguments: Callable[[], tuple[Any, ...]],
    dtype: str = "bfloat16",
) -> Build:  # fmt: skip
    dims: Dims = {"in_features": 4096, "out_features": outputs}
    return Build(kernel, label, arguments, dtype, dims, matrix=True)


BUILDS = (
    *(make(*step) for make in (_mxfp4, _mxfp8, _nvfp4) for step in STEPS),
    *(_mxfp4(f"{tokens} tokens, float16", tokens, 4096, FP16) for tokens in (64, 4096)),
)
