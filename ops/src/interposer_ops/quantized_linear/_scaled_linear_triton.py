# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton linear layers of 8-bit floats and int8.

T rows, I input features, O output features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer import Dim, Dims
from interposer_ops._triton.build import (
    BF16,
    E4M3,
    E4M3_FNUZ,
    E5M2,
    FP32,
    INT8,
    INT32,
    Build,
    all_but,
    dtype_name,
    given,
)
from interposer_ops._triton.declare import triton_kernel
from interposer_ops._triton.float8_operands import operands
from interposer_ops._triton.rows import as_rows
from interposer_ops.quantized_linear._linear_tiles_triton import (
    STEPS,
    add_matmul,
    linear_tile,
    load_tiles,
    store_tile,
    tile_position,
)


@triton_kernel("fp8_linear", judge="judge_operands", batch_invariant=False)
def fp8_linear_triton(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``fp8_linear``; the scales are applied once, to the sum."""
    return _scaled("fp8_linear", x, weight, x_scale, weight_scale, None, bias, out_dtype)


@triton_kernel("int8_linear", dims={"in_features": Dim(at_most=65536)}, judge="judge_integers")
def int8_linear_triton(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor,
    x_zero_point: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``int8_linear``; sums of the weights correct for zero points of the inputs."""
    kernel = "int8_linear" if x_zero_point is None else "int8_linear_shifted"
    return _scaled(kernel, x, weight, x_scale, weight_scale, x_zero_point, bias, out_dtype)


@triton_kernel(
    "fp8_block_linear",
    dims={"block_columns": Dim(multiple_of=32)},
    judge="judge_operands",
    batch_invariant=False,
)
def fp8_block_linear_triton(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor,
    block_rows: int, block_columns: int, bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``fp8_block_linear``; the sum over each block is scaled, then added to the total."""
    out_features, in_features = weight.shape
    y = torch.empty((*x.shape[:-1], out_features), dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    scales = x_scales.reshape(-1, x_scales.shape[-1])
    num_rows = rows.shape[0]
    tile = linear_tile("fp8_block_linear", x.device, num_rows)
    # The largest power of two that divides a block: each loop step then has one scale.
    tile = tile._replace(inputs=min(tile.inputs, block_columns & -block_columns))
    formats = operands(x.device, x.dtype, weight.dtype, tile.operand_bits)
    _block_linear[(tile.num_programs(num_rows, out_features),)](
        rows.view(torch.int8) if formats.is_decoded else rows,
        weight.view(torch.int8) if formats.is_decoded else weight,
        scales, weight_scales, bias, y, num_rows,
        rows.stride(0), scales.stride(0), scales.stride(1),
        INPUTS=in_features, OUTPUTS=out_features, BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns, X_FORMAT=formats.x, WEIGHT_FORMAT=formats.weight,
        **tile.options,
    )  # fmt: skip
    return y


def _scaled(
    kernel: str, x: Tensor, weight: Tensor, x_scale: Tensor,
    weight_scale: Tensor, zero_point: Tensor | None, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    out_features, in_features = weight.shape
    y = torch.empty((*x.shape[:-1], out_features), dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = as_rows(x)
    num_rows = rows.shape[0]
    tile = linear_tile(kernel, x.device, num_rows)
    formats = operands(x.device, x.dtype, weight.dtype, tile.operand_bits)
    _scaled_linear[(tile.num_programs(num_rows, out_features),)](
        rows.view(torch.int8) if formats.is_decoded else rows,
        weight.view(torch.int8) if formats.is_decoded else weight,
        x_scale, weight_scale, zero_point, bias, y, num_rows, rows.stride(0),
        # Stride 0 makes every row or output read the one scale of the tensor.
        0 if x_scale.numel() == 1 else 1, 0 if weight_scale.numel() == 1 else 1,
        INPUTS=in_features, OUTPUTS=out_features, X_FORMAT=formats.x, WEIGHT_FORMAT=formats.weight,
        **tile.options,
    )  # fmt: skip
    return y


# Without this, triton compiles again for row counts and strides of 1 and of multiples of 16.
@triton.jit(do_not_specialize=["num_rows", "x_scale_stride", "weight_scale_stride"])
def _scaled_linear(
    x, weight, x_scale, weight_scale, zero_point, bias, y, num_rows, x_stride, x_scale_stride,
    weight_scale_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr, X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr,
):  # fmt: skip
    row, output = tile_position(num_rows, OUTPUTS, ROW_TILE, OUTPUT_TILE, GROUP)
    # Rows and outputs past the end read row or output 0 instead and are not stored.
    safe_row = tl.where(row < num_rows, row, 0)
    safe_output = tl.where(output < OUTPUTS, output, 0)
    column = tl.arange(0, STEP)
    x += safe_row[:, None] * x_stride + column[None, :]
    weight += safe_output[None, :].to(tl.int64) * INPUTS + column[:, None]
    IS_INTEGER: tl.constexpr = X_FORMAT == "int8"
    total = tl.zeros([ROW_TILE, OUTPUT_TILE], tl.int32 if IS_INTEGER else tl.float32)
    weight_sums = tl.zeros([OUTPUT_TILE], tl.int32)
    for start in range(0, INPUTS, STEP):
        a, b = load_tiles(x, weight, start, column, INPUTS, INPUTS % STEP == 0)
        if IS_INTEGER:
            total = tl.dot(a, b, total, out_dtype=tl.int32)
            if zero_point is not None:
                weight_sums += tl.sum(b.to(tl.int32), axis=0)
        else:
            total = add_matmul(a, b, total, STEP, X_FORMAT, WEIGHT_FORMAT)
    if zero_point is not None:
        # (x - z) w = x w - z sum(w)
        shift = tl.load(zero_point + safe_row * x_scale_stride)
        total -= shift[:, None] * weight_sums[None, :]
    result = total.to(tl.float32) * tl.load(x_scale + safe_row * x_scale_stride)[:, None]
    result *= tl.load(weight_scale + safe_output * weight_scale_stride)[None, :]
    store_tile(result, bias, y, row, output, safe_output, num_rows, OUTPUTS)


@triton.jit(do_not_specialize=["num_rows"])
def _block_linear(
    x, weight, x_scales, weight_scales, bias, y, num_rows, x_stride, scale_stride,
    scale_column_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr, X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr,
):  # fmt: skip
    row, output = tile_position(num_rows, OUTPUTS, ROW_TILE, OUTPUT_TILE, GROUP)
    safe_row = tl.where(row < num_rows, row, 0)
    safe_output = tl.where(output < OUTPUTS, output, 0)
    column = tl.arange(0, STEP)
    x += safe_row[:, None] * x_stride + column[None, :]
    weight += safe_output[None, :].to(tl.int64) * INPUTS + column[:, None]
    x_scales += safe_row * scale_stride
    num_blocks: tl.constexpr = (INPUTS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    if BLOCK_ROWS % OUTPUT_TILE == 0:
        # All outputs of the tile are in one block of the weight.
        weight_scales += tl.min(output, axis=0) // BLOCK_ROWS * num_blocks
    else:
        weight_scales += safe_output // BLOCK_ROWS * num_blocks
    total = tl.zeros([ROW_TILE, OUTPUT_TILE], tl.float32)
    for start in range(0, INPUTS, STEP):
        a, b = load_tiles(x, weight, start, column, INPUTS, INPUTS % STEP == 0)
        block = start // BLOCK_COLUMNS
        x_scale = tl.load(x_scales + block * scale_column_stride)
        weight_scale = tl.load(weight_scales + block)
        part = tl.zeros([ROW_TILE, OUTPUT_TILE], tl.float32)
        part = add_matmul(a, b, part, STEP, X_FORMAT, WEIGHT_FORMAT)
        if BLOCK_ROWS % OUTPUT_TILE == 0:
            total += part * (x_scale * weight_scale)[:, None]
        else:
            total += part * x_scale[:, None] * weight_scale[None, :]
    store_tile(total, bias, y, row, output, safe_output, num_rows, OUTPUTS)


def _fp8(
    label: str, tokens: int, outputs: int, x: torch.dtype = E4M3, weight: torch.dtype = E4M3,
    bias: bool = False, without: frozenset[str] = frozenset(),
) -> Build:  # fmt: skip
    arguments = given(
        *_operands(tokens, outputs, x, weight), (BF16, outputs) if bias else None, BF16
    )
    dims = _dims(outputs, x, weight)
    return Build("fp8_linear_triton", label, arguments, "bfloat16", dims, True, without)


def _blocks(label: str, tokens: int, outputs: int) -> Build:
    scales = (FP32, tokens, 32), (FP32, outputs // 128, 32)
    arguments = given((E4M3, tokens, 4096), (E4M3, outputs, 4096), *scales, 128, 128, None, BF16)
    dims: Dims = {**_dims(outputs, E4M3, E4M3), "block_rows": 128, "block_columns": 128}
    return Build("fp8_block_linear_triton", label, arguments, "bfloat16", dims, True)


def _int8(label: str, tokens: int, outputs: int, shifted: bool = False) -> Build:
    shift = (INT32, tokens, 1) if shifted else None
    arguments = given(*_operands(tokens, outputs, INT8, INT8), shift, (BF16, outputs), BF16)
    dims: Dims = {"in_features": 4096, "out_features": outputs}
    # Triton multiplies integers only on sm_80 and newer.
    return Build(
        "int8_linear_triton", label, arguments, "bfloat16", dims, True, frozenset({"sm_75"})
    )


def _operands(
    tokens: int, outputs: int, x: torch.dtype, weight: torch.dtype
) -> tuple[tuple[object, ...], ...]:
    return (x, tokens, 4096), (weight, outputs, 4096), (FP32, tokens, 1), (FP32, outputs)


def _dims(outputs: int, x: torch.dtype, weight: torch.dtype) -> Dims:
    features: Dims = {"in_features": 4096, "out_features": outputs}
    return {**features, "x_dtype": dtype_name(x), "weight_dtype": dtype_name(weight)}


_FNUZ = (E4M3_FNUZ, E4M3_FNUZ)
BUILDS = (
    *(make(*step) for make in (_fp8, _blocks, _int8) for step in STEPS),
    *(
        build
        for n in (64, 4096)
        for build in (
            _fp8(f"{n} tokens, float8_e5m2 by float8_e4m3fn, bias", n, 4096, E5M2, bias=True),
            _fp8(f"{n} tokens, float8_e4m3fnuz", n, 4096, *_FNUZ, without=all_but("gfx942")),
            _int8(f"{n} tokens, zero points", n, 4096, shifted=True),
        )
    ),
)
