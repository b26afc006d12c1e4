"""Quantizers of activations by the compiled library. T tokens, H hidden size, B block size."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from interposer import Request, Verdict
from interposer_cpu import native
from interposer_cpu._kernels.fusion import fused, quantization_fields
from interposer_cpu._kernels.interface import CODE_TYPES, FLOAT32, SHARED_EXPONENTS, TYPES
from interposer_cpu._kernels.rows import row_layout
from interposer_cpu.native import library
from interposer_ops.quantizers import MX_BLOCK_SIZE

_INT8, _E4M3 = torch.int8, torch.float8_e4m3fn
_MANTISSA_BITS = 23


@fused("quantizer", "int8", read=lambda: quantization_fields(_INT8))
def quantize_int8_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op ``quantize_int8_per_token``: one dynamic scale per row."""
    return _quantize(x, _INT8, None, 0.0)


@fused("quantizer", "int8", read=lambda zero_point: quantization_fields(_INT8), is_static=True)
def quantize_int8_static(
    x: torch.Tensor, scale: torch.Tensor, zero_point: None = None
) -> torch.Tensor:
    """Compute the op ``quantize_int8_static`` without a zero point."""
    return _quantize_static(x, scale, _INT8)


@fused("quantizer", "fp8", read=quantization_fields)
def quantize_fp8_per_token(
    x: torch.Tensor, out_dtype: torch.dtype, scale_limit: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op ``quantize_fp8_per_token`` for float8_e4m3fn."""
    return _quantize(x, out_dtype, None, scale_limit or 0.0)


@fused("quantizer", "fp8", read=quantization_fields, is_static=True)
def quantize_fp8_static(
    x: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Compute the op ``quantize_fp8_static`` for float8_e4m3fn."""
    return _quantize_static(x, scale, out_dtype)


@fused(
    "quantizer",
    "fp8 blocks",
    "mxfp8",
    read=lambda size, dtype, powers: quantization_fields(dtype, None, size, int(powers)),
)
def quantize_fp8_blocks(
    x: torch.Tensor, block_size: int, out_dtype: torch.dtype, power_of_two_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op ``quantize_fp8_blocks`` for float8_e4m3fn and rows of whole blocks."""
    return _quantize(x, out_dtype, block_size, 0.0, int(power_of_two_scales))


@fused(
    "quantizer",
    "mxfp8",
    read=lambda: quantization_fields(_E4M3, None, MX_BLOCK_SIZE, SHARED_EXPONENTS),
)
def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op ``quantize_mxfp8``: 32 elements share a power-of-two scale."""
    quantized, scales = _quantize(x, _E4M3, MX_BLOCK_SIZE, 0.0, SHARED_EXPONENTS)
    # The biased exponent of a float32 power of two is its e8m0 encoding; 2^-127 is subnormal and
    # has the biased exponent 0, as in e8m0.
    return quantized, (scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)


def judge_format(request: Request) -> Verdict:
    """Accept only float8_e4m3fn as the dtype of the quantized values."""
    out_dtype = request.dims["out_dtype"]
    if out_dtype != "float8_e4m3fn":
        return Verdict.refuse(f"makes codes of float8_e4m3fn, requested {out_dtype}")
    return native.judge(request)


def judge_blocks(request: Request) -> Verdict:
    """Accept dtypes that ``judge_format`` accepts, if the block size divides the hidden size."""
    size, width = int(request.dims["block_size"]), int(request.dims["hidden_size"])
    if width % size:
        return Verdict.refuse(f"takes rows of whole blocks, got {width} elements by {size}")
    return judge_format(request)


def judge_symmetric(request: Request) -> Verdict:
    """Accept only symmetric quantization of activations, without a zero point."""
    if request.dims["asymmetric"]:
        return Verdict.refuse("makes codes that are symmetric around zero")
    return native.judge(request)


def _quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    block_size: int | None,
    limit: float,
    powers: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` with one scale per row, or per B elements; return values and scales."""
    layout = row_layout(x)
    if layout is None or layout[1] > 1:
        quantized, scales = _quantize(x.contiguous(), dtype, block_size, limit, powers)
        return torch.empty_like(x, dtype=dtype).copy_(quantized), scales
    count, _, width, step, _ = layout
    size = block_size or width
    inner = width // size if size else 1  # scales per row; a row can have no elements
    if x.ndim == 2:  # the frequent case, without building a shape tuple
        quantized = torch.empty(count, width, dtype=dtype)
        scales = torch.empty(count, inner, dtype=FLOAT32)
    else:
        quantized = torch.empty(x.shape, dtype=dtype)
        scales = torch.empty((*x.shape[:-1], inner), dtype=FLOAT32)
    if is_compiling():
        torch.ops.interposer_cpu.code_out(
            quantized.view(-1, width),
            scales.view(-1, inner),
            x.reshape(-1, width),
            CODE_TYPES[dtype],
            size,
            powers,
            limit,
        )
        return quantized, scales
    library().code(
        x.data_ptr(),
        quantized.data_ptr(),
        scales.data_ptr(),
        0,
        TYPES[x.dtype],
        CODE_TYPES[dtype],
        count,
        inner,
        size,
        step,
        size,
        powers,
        limit,
    )
    return quantized, scales


def _quantize_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize ``x`` with one static scale ``[1]``."""
    layout = row_layout(x)
    if layout is None or layout[1] > 1:
        quantized = _quantize_static(x.contiguous(), scale, dtype)
        return torch.empty_like(x, dtype=dtype).copy_(quantized)
    count, _, width, step, _ = layout
    quantized = torch.empty(x.shape, dtype=dtype)
    if is_compiling():
        torch.ops.interposer_cpu.code_by_scale_out(
            quantized.view(-1, width), x.reshape(-1, width), scale, CODE_TYPES[dtype]
        )
        return quantized
    library().code(
        x.data_ptr(),
        quantized.data_ptr(),
        0,
        scale.data_ptr(),
        TYPES[x.dtype],
        CODE_TYPES[dtype],
        count,
        1,
        width,
        step,
        width,
        0,
        0.0,
    )
    return quantized
