"""Projections by weights that are packed for vectors of sixteen outputs.

Dimensions: T tokens, I input features, O output features, G inputs per scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interposer import Request, Verdict
from interposer_cpu import native
from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import TYPES
from interposer_cpu._kernels.packed_copies import Packed, shared_copy
from interposer_cpu._kernels.packing import PLAIN_FORMATS, PackedFormat, described
from interposer_ops.devices import host_memory
from interposer_ops.quantizers import decode_e8m0

# Inputs are floats, or codes that were quantized before.
_INPUT_TYPES = {**TYPES, torch.int8: 3}

# Sums of products of bytes are held in 32 bits.
_MOST_CODES = 1 << 15


@fused("linear")
def linear(x: torch.Tensor, weight: Packed, bias: None) -> torch.Tensor:
    """Return the op ``linear`` for a ``weight`` of ``pack``, which holds the bias."""
    return _product(x, weight, x.dtype, None)


def batched_linear(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Return the op ``batched_linear`` for a ``weight`` of ``pack_batched``."""
    packed, out_features = weight
    heads, rows, _ = x.shape
    steps = x.stride()
    if steps[2] != 1:
        x = x.contiguous()
        steps = x.stride()
    dtype = x.dtype
    out = torch.empty(heads, rows, out_features, dtype=dtype)
    if torch.compiler.is_compiling():
        torch.ops.interposer_cpu.multiply_batch_out(out, x, packed)
        return out
    native.library().multiply_batch(
        packed.data_ptr(), x.data_ptr(), out.data_ptr(), TYPES[dtype], heads, rows, *steps[:2]
    )
    return out


@fused("linear")
def w4a16_linear(
    x: torch.Tensor, weight: Packed, scale: None, bias: None, zero_points: None = None
) -> torch.Tensor:
    """Return the op ``w4a16_linear`` for a ``weight`` of ``pack_w4a16``, which holds the rest."""
    return _product(x, weight, x.dtype, None)


@fused("linear")
def w8a16_linear(
    x: torch.Tensor, weight: Packed, scale: None, bias: None, zero_points: None = None
) -> torch.Tensor:
    """Return the op ``w8a16_linear`` for a ``weight`` of ``pack_w8a16``, which holds the rest."""
    return _product(x, weight, x.dtype, None)


@fused("linear")
def mxfp4_linear(x: torch.Tensor, weight: Packed, weight_scales: None, bias: None) -> torch.Tensor:
    """Return the op ``mxfp4_linear`` for a ``weight`` of ``pack_mxfp4``, which holds the rest."""
    return _product(x, weight, x.dtype, None)


@fused("linear", "int8")
def int8_linear(
    x: torch.Tensor,
    weight: Packed,
    x_scale: torch.Tensor,
    weight_scale: None,
    x_zero_point: None,
    bias: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the op ``int8_linear`` for a ``weight`` of ``pack_int8``, which holds the rest."""
    return _product(x, weight, out_dtype, x_scale)


@fused("linear", "int8")
def w4a8_linear(
    x: torch.Tensor,
    weight: Packed,
    x_scale: torch.Tensor,
    weight_scales: None,
    x_zero_point: None,
    weight_zero_points: None,
    bias: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the op ``w4a8_linear`` for a ``weight`` of ``pack_w4a8``, which holds the rest."""
    return _product(x, weight, out_dtype, x_scale)


@fused("linear", "fp8")
def fp8_linear(
    x: torch.Tensor,
    weight: Packed,
    x_scale: torch.Tensor,
    weight_scale: None,
    bias: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the op ``fp8_linear`` for a ``weight`` of ``pack_fp8``, which holds the rest.

    bfloat16 holds every 8-bit float, so nothing is lost on the way.
    """
    return _product(x.to(torch.bfloat16), weight, out_dtype, x_scale)


@fused("linear", "fp8 blocks")
def fp8_block_linear(
    x: torch.Tensor,
    weight: Packed,
    x_scales: torch.Tensor,
    weight_scales: None,
    block_rows: int,
    block_columns: int,
    bias: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the op ``fp8_block_linear`` for a ``weight`` of ``pack_fp8_blocks``."""
    return _product(x.to(torch.bfloat16), weight, out_dtype, x_scales.contiguous())


@fused("linear", "mxfp8")
def mxfp8_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Packed,
    weight_scales: None,
    bias: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the op ``mxfp8_linear`` for a ``weight`` of ``pack_mxfp8``, which holds the rest."""
    scales = decode_e8m0(x_scales, torch.float32).contiguous()
    return _product(x.to(torch.bfloat16), weight, out_dtype, scales)


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Return the constants of ``linear`` with ``weight`` ``[O, I]`` packed."""
    form = PLAIN_FORMATS[weight.dtype]
    packed = shared_copy(form, (weight, bias), lambda: _pack(form, weight, bias=bias))
    return {"weight": packed, "bias": None}


def pack_batched(weight: torch.Tensor) -> dict[str, Any]:
    """Return the constant of ``batched_linear`` with ``weight`` ``[N, I, O]`` packed."""
    form, library = PLAIN_FORMATS[weight.dtype], native.library()
    heads = [described(form, head.T) for head in weight]
    size = library.packed_bytes(*heads[0][0])
    packed = host_memory.empty([len(heads) * size], torch.uint8, lasting=True)
    for number, (description, _held) in enumerate(heads):
        library.pack(*description, packed.data_ptr() + number * size)
    return {"weight": (packed, weight.shape[2])}


def unpack(weight: Packed, bias: None, into: Mapping[str, torch.Tensor]) -> None:
    """Fill ``into["weight"]``, dense ``[O, I]``, with what ``pack`` packed."""
    (packed, count), out = weight, into["weight"]
    ids = torch.arange(count)
    native.library().rows(
        packed.data_ptr(), ids.data_ptr(), count, out.data_ptr(), TYPES[out.dtype]
    )


def pack_w4a16(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the constants of ``w4a16_linear``, all in the packed weight."""
    packed = shared_copy(
        PackedFormat.INT4,
        (weight, scale, zero_points, bias),
        lambda: _pack(PackedFormat.INT4, weight, _narrowed(scale), zero_points, bias),
    )
    return {"weight": packed, "scale": None, "bias": None, "zero_points": None}


def pack_w8a16(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the constants of ``w8a16_linear``, all in the packed weight."""
    scales = scale if scale.ndim == 2 else scale.unsqueeze(1)
    packed = shared_copy(
        PackedFormat.INT8,
        (weight, scale, zero_points, bias),
        lambda: _pack(PackedFormat.INT8, weight, _narrowed(scales), _raised(zero_points), bias),
    )
    return {"weight": packed, "scale": None, "bias": None, "zero_points": None}


def pack_mxfp4(
    weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Return the constants of ``mxfp4_linear``, all in the packed weight."""
    packed = _pack(PackedFormat.E2M1, weight, weight_scales, bias=bias)
    return {"weight": packed, "weight_scales": None, "bias": None}


def pack_int8(
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Return the constants of ``int8_linear``, all in the packed weight."""
    packed = pack_w8a16(weight, weight_scale, bias)["weight"]
    return {"weight": packed, "weight_scale": None, "bias": None}


def pack_w4a8(
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_zero_points: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the constants of ``w4a8_linear``, all in the packed weight."""
    packed = pack_w4a16(weight, weight_scales, bias, weight_zero_points)["weight"]
    return {"weight": packed, "weight_scales": None, "weight_zero_points": None, "bias": None}


def pack_fp8(
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Return the constants of ``fp8_linear``, all in the packed weight."""
    packed = _pack(PackedFormat.E4M3, weight, weight_scale.unsqueeze(1), bias=bias)
    return {"weight": packed, "weight_scale": None, "bias": None}


def pack_fp8_blocks(
    weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Return the constants of ``fp8_block_linear``, all in the packed weight.

    Its blocks are whole, so that their number says how large they are.
    """
    out_features, num_rows = weight.shape[0], weight_scales.shape[0]
    scales = weight_scales.repeat_interleave(max(out_features // max(num_rows, 1), 1), 0)
    packed = _pack(PackedFormat.E4M3, weight, _narrowed(scales), bias=bias)
    return {"weight": packed, "weight_scales": None, "bias": None}


def pack_mxfp8(
    weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Return the constants of ``mxfp8_linear``, all in the packed weight."""
    packed = _pack(PackedFormat.E4M3, weight, weight_scales, bias=bias)
    return {"weight": packed, "weight_scales": None, "bias": None}


def judge_groups(request: Request) -> Verdict:
    """Accept one scale for all inputs, or groups of whole words of eight codes."""
    group_size = int(request.dims["group_size"])
    if int(request.dims["num_groups"]) > 1 and group_size % 8:
        return Verdict.refuse(f"takes groups of multiples of 8 inputs, got {group_size}")
    return native.judge(request)


def judge_codes(request: Request) -> Verdict:
    """Accept groups as ``judge_groups`` does, and inputs that are symmetric around zero."""
    if request.dims["asymmetric_inputs"]:
        return Verdict.refuse("takes inputs that are symmetric around zero")
    verdict = judge_groups(request)
    return _judge_length(request) if verdict else verdict


def judge_symmetric(request: Request) -> Verdict:
    """Accept inputs that are symmetric around zero."""
    if request.dims["asymmetric"]:
        return Verdict.refuse("takes inputs that are symmetric around zero")
    return _judge_length(request)


def judge_fp8(request: Request) -> Verdict:
    """Accept weights of the one 8-bit float that has a decoder."""
    found = request.dims["weight_dtype"]
    if found != "float8_e4m3fn":
        return Verdict.refuse(f"takes weights of float8_e4m3fn, got {found}")
    return native.judge(request)


def judge_fp8_blocks(request: Request) -> Verdict:
    """Accept what ``judge_fp8`` does, in whole blocks of multiples of 8 inputs."""
    for features, block in (("out_features", "block_rows"), ("in_features", "block_columns")):
        size, length = int(request.dims[block]), int(request.dims[features])
        if size > length or length % size:
            return Verdict.refuse(f"takes whole blocks, got {length} {features} by {size}")
    columns = int(request.dims["block_columns"])
    if columns < int(request.dims["in_features"]) and columns % 8:
        return Verdict.refuse(f"takes blocks of multiples of 8 inputs, got {columns}")
    return judge_fp8(request)


def _judge_length(request: Request) -> Verdict:
    length = int(request.dims["in_features"])
    if length > _MOST_CODES:
        return Verdict.refuse(f"sums at most {_MOST_CODES} products in 32 bits, got {length}")
    return native.judge(request)


def _product(
    x: torch.Tensor, weight: Packed, out_dtype: torch.dtype, x_scale: torch.Tensor | None
) -> torch.Tensor:
    packed, out_features = weight
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    num_rows = rows.shape[0]
    out = torch.empty(num_rows, out_features, dtype=out_dtype)  # a tuple would cost more
    if torch.compiler.is_compiling():
        scale = packed if x_scale is None else x_scale.reshape(-1)
        torch.ops.interposer_cpu.linear_out(out, rows, packed, scale)
    else:
        native.library().linear(
            packed.data_ptr(),
            rows.data_ptr(),
            _INPUT_TYPES[rows.dtype],
            num_rows,
            rows.stride(0),
            0 if x_scale is None else x_scale.data_ptr(),
            out.data_ptr(),
            TYPES[out_dtype],
            out_features,
            0 if x_scale is None or x_scale.numel() == 1 else x_scale.shape[-1],
        )
    return out if x.ndim == 2 else out.view(*x.shape[:-1], out_features)


def _pack(
    form: PackedFormat,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zero_points: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Packed:
    """Return ``weight`` ``[O, I]``, or ``[O, I / 2]`` of pairs, with all that belongs to it."""
    description, _held = described(form, weight, scales, zero_points, bias)
    library = native.library()
    num_bytes = library.packed_bytes(*description)
    packed = host_memory.empty([num_bytes], torch.uint8, lasting=True)
    library.pack(*description, packed.data_ptr())
    return packed, weight.shape[0]


def _narrowed(scales: torch.Tensor) -> torch.Tensor:
    """Return float32 ``scales`` in 16 bits if these hold the same numbers."""
    if scales.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = scales.to(dtype)
            if torch.equal(narrow.float(), scales):
                return narrow
    return scales


def _raised(zero_points: torch.Tensor | None) -> torch.Tensor | None:
    """Return int8 zero points as uint8, raised by 128 as the codes are."""
    return None if zero_points is None else zero_points.view(torch.uint8) ^ 0x80
