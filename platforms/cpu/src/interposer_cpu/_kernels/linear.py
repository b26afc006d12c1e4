"""Linear layers of the compiled library, with weights packed in panels of sixteen outputs.

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
from interposer_cpu._kernels.packing import PLAIN_FORMATS, PackedFormat, describe_weight
from interposer_ops.devices import host_memory
from interposer_ops.quantizers import decode_e8m0

# Inputs are floats, or int8 values quantized by another kernel.
_INPUT_TYPES = {**TYPES, torch.int8: 3}

# More inputs could overflow the 32-bit sum of int8 products.
_MOST_CODES = 1 << 15

# Levels on which decoding a compact weight was measured to be faster than reading a plain one.
_COMPACT_LEVELS = ("avx512_bf16", "amx")
_COMPACT_NOTE = "keeps bfloat16 weights in 12 bits per number, without loss"


@fused("linear")
def linear(x: torch.Tensor, weight: Packed, bias: None) -> torch.Tensor:
    """Compute the op ``linear`` with a ``weight`` that includes the bias, packed by ``pack``."""
    return _matmul(x, weight, x.dtype, None)


@fused("batched_linear")
def batched_linear(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Compute the op ``batched_linear`` with a ``weight`` packed by ``pack_batched``."""
    packed, out_features = weight
    heads, rows, _ = x.shape
    steps = x.stride()
    if steps[2] != 1:
        x = x.contiguous()
        steps = x.stride()
    dtype = x.dtype
    out = torch.empty(heads, rows, out_features, dtype=dtype)
    if torch.compiler.is_compiling():
        # The op's schema has no optional tensors: the packed weight stands for None.
        torch.ops.interposer_cpu.multiply_batch_out(out, x, packed, packed)
        return out
    number = TYPES[dtype]
    native.library().multiply_batch(
        packed.data_ptr(),
        x.data_ptr(),
        0,  # no scales
        number,
        out.data_ptr(),
        number,
        heads,
        rows,
        out_features,
        *steps[:2],
    )
    return out


@fused("linear")
def w4a16_linear(
    x: torch.Tensor, weight: Packed, scale: None, bias: None, zero_points: None = None
) -> torch.Tensor:
    """Compute the op ``w4a16_linear``; ``pack_w4a16`` has packed all constants in ``weight``."""
    return _matmul(x, weight, x.dtype, None)


@fused("linear")
def w8a16_linear(
    x: torch.Tensor, weight: Packed, scale: None, bias: None, zero_points: None = None
) -> torch.Tensor:
    """Compute the op ``w8a16_linear``; ``pack_w8a16`` has packed all constants in ``weight``."""
    return _matmul(x, weight, x.dtype, None)


@fused("linear")
def mxfp4_linear(x: torch.Tensor, weight: Packed, weight_scales: None, bias: None) -> torch.Tensor:
    """Compute the op ``mxfp4_linear``; ``pack_mxfp4`` has packed all constants in ``weight``."""
    return _matmul(x, weight, x.dtype, None)


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
    """Compute the op ``int8_linear``; ``pack_int8`` has packed all constants in ``weight``."""
    return _matmul(x, weight, out_dtype, x_scale)


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
    """Compute the op ``w4a8_linear``; ``pack_w4a8`` has packed all constants in ``weight``."""
    return _matmul(x, weight, out_dtype, x_scale)


@fused("linear", "fp8")
def fp8_linear(
    x: torch.Tensor,
    weight: Packed,
    x_scale: torch.Tensor,
    weight_scale: None,
    bias: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``fp8_linear``; ``pack_fp8`` has packed all constants in ``weight``.

    Inputs are converted to bfloat16, which represents every 8-bit float exactly.
    """
    return _matmul(x.to(torch.bfloat16), weight, out_dtype, x_scale)


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
    """Compute the op ``fp8_block_linear`` with a ``weight`` packed by ``pack_fp8_blocks``."""
    return _matmul(x.to(torch.bfloat16), weight, out_dtype, x_scales.contiguous())


@fused("linear", "mxfp8")
def mxfp8_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Packed,
    weight_scales: None,
    bias: None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``mxfp8_linear``; ``pack_mxfp8`` has packed all constants in ``weight``."""
    scales = decode_e8m0(x_scales, torch.float32).contiguous()
    return _matmul(x.to(torch.bfloat16), weight, out_dtype, scales)


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Pack the ``weight`` ``[O, I]`` and bias of ``linear`` into one tensor."""
    form = PLAIN_FORMATS[weight.dtype]
    packed = shared_copy(form, (weight, bias), lambda: _pack(form, weight, bias=bias))
    return {"weight": packed, "bias": None}


def pack_compact(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Pack as ``pack`` does, but a bfloat16 ``weight`` in 12 bits per number, without loss.

    A weight of another dtype, or with widely spread exponents, is packed as by ``pack``.
    """
    if weight.dtype != torch.bfloat16:
        return pack(weight, bias)
    packed = shared_copy(PackedFormat.COMPACT, (weight, bias), lambda: _pack_compact(weight, bias))
    return {"weight": packed, "bias": None}


def pack_batched(weight: torch.Tensor) -> dict[str, Any]:
    """Pack the ``weight`` ``[N, I, O]`` of ``batched_linear``, one packed weight per head."""
    form, library = PLAIN_FORMATS[weight.dtype], native.library()
    heads = [describe_weight(form, head.T) for head in weight]
    size = library.packed_bytes(*heads[0][0])
    packed = host_memory.empty([len(heads) * size], torch.uint8, lasting=True)
    # All heads have the same shape and format, so the same packed size.
    for number, (description, _tensors) in enumerate(heads):
        library.pack(*description, packed.data_ptr() + number * size)
    return {"weight": (packed, weight.shape[2])}


def unpack(weight: Packed, bias: None, into: Mapping[str, torch.Tensor]) -> None:
    """Unpack a weight of ``pack`` into the dense tensor ``into["weight"]`` ``[O, I]``."""
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
    """Pack all constants of ``w4a16_linear`` into one weight."""
    packed = shared_copy(
        PackedFormat.INT4,
        (weight, scale, zero_points, bias),
        lambda: _pack(PackedFormat.INT4, weight, _narrow_exactly(scale), zero_points, bias),
    )
    return {"weight": packed, "scale": None, "bias": None, "zero_points": None}


def pack_w8a16(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Pack all constants of ``w8a16_linear`` into one weight."""
    scales = scale if scale.ndim == 2 else scale.unsqueeze(1)
    packed = shared_copy(
        PackedFormat.INT8,
        (weight, scale, zero_points, bias),
        lambda: _pack(
            PackedFormat.INT8,
            weight,
            _narrow_exactly(scales),
            _shift_zero_points(zero_points),
            bias,
        ),
    )
    return {"weight": packed, "scale": None, "bias": None, "zero_points": None}


def pack_mxfp4(
    weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Pack all constants of ``mxfp4_linear`` into one weight."""
    packed = _pack(PackedFormat.E2M1, weight, weight_scales, bias=bias)
    return {"weight": packed, "weight_scales": None, "bias": None}


def pack_int8(
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Pack all constants of ``int8_linear`` into one weight."""
    packed = pack_w8a16(weight, weight_scale, bias)["weight"]
    return {"weight": packed, "weight_scale": None, "bias": None}


def pack_w4a8(
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_zero_points: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> dict[str, Any]:
    """Pack all constants of ``w4a8_linear`` into one weight."""
    packed = pack_w4a16(weight, weight_scales, bias, weight_zero_points)["weight"]
    return {"weight": packed, "weight_scales": None, "weight_zero_points": None, "bias": None}


def pack_fp8(
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Pack all constants of ``fp8_linear`` into one weight."""
    packed = _pack(PackedFormat.E4M3, weight, weight_scale.unsqueeze(1), bias=bias)
    return {"weight": packed, "weight_scale": None, "bias": None}


def pack_fp8_blocks(
    weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Pack all constants of ``fp8_block_linear`` into one weight.

    Blocks divide the weight evenly, see ``judge_fp8_blocks``, so that the shape of the scales
    determines the block size.
    """
    out_features, num_rows = weight.shape[0], weight_scales.shape[0]
    scales = weight_scales.repeat_interleave(max(out_features // max(num_rows, 1), 1), 0)
    packed = _pack(PackedFormat.E4M3, weight, _narrow_exactly(scales), bias=bias)
    return {"weight": packed, "weight_scales": None, "bias": None}


def pack_mxfp8(
    weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """Pack all constants of ``mxfp8_linear`` into one weight."""
    packed = _pack(PackedFormat.E4M3, weight, weight_scales, bias=bias)
    return {"weight": packed, "weight_scales": None, "bias": None}


def judge_compact(request: Request) -> Verdict:
    """Accept devices where the dot products of bfloat16 make decoding of weights pay."""
    if not set(_COMPACT_LEVELS) & set(native.levels_of(request.capability)):
        return Verdict.refuse(
            f"decodes weights faster than memory is read on {' and '.join(_COMPACT_LEVELS)} only"
        )
    verdict = native.judge(request)
    return Verdict.accept(_COMPACT_NOTE) if verdict else verdict


def judge_groups(request: Request) -> Verdict:
    """Accept one scale for all inputs, or groups of multiples of 8 inputs."""
    group_size = int(request.dims["group_size"])
    if int(request.dims["num_groups"]) > 1 and group_size % 8:
        return Verdict.refuse(f"takes groups of multiples of 8 inputs, got {group_size}")
    return native.judge(request)


def judge_codes(request: Request) -> Verdict:
    """Accept symmetric inputs, if ``judge_groups`` accepts the weight's groups."""
    if request.dims["asymmetric_inputs"]:
        return Verdict.refuse("takes inputs that are symmetric around zero")
    verdict = judge_groups(request)
    return _judge_length(request) if verdict else verdict


def judge_symmetric(request: Request) -> Verdict:
    """Accept only symmetric quantization of the inputs, without a zero point."""
    if request.dims["asymmetric"]:
        return Verdict.refuse("takes inputs that are symmetric around zero")
    return _judge_length(request)


def judge_fp8(request: Request) -> Verdict:
    """Accept weights of float8_e4m3fn, the only 8-bit float that the library decodes."""
    weight_dtype = request.dims["weight_dtype"]
    if weight_dtype != "float8_e4m3fn":
        return Verdict.refuse(f"takes weights of float8_e4m3fn, got {weight_dtype}")
    return native.judge(request)


def judge_fp8_blocks(request: Request) -> Verdict:
    """Accept weights that ``judge_fp8`` accepts, in blocks that divide the weight evenly.

    A block must have a multiple of 8 inputs, or all inputs.
    """
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


def _matmul(
    x: torch.Tensor, weight: Packed, out_dtype: torch.dtype, x_scale: torch.Tensor | None
) -> torch.Tensor:
    packed, out_features = weight
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    # Few Python operations: at decode, they are a visible part of the matmul's time.
    num_rows = rows.shape[0]
    out = torch.empty(num_rows, out_features, dtype=out_dtype)  # a tuple would cost more
    if torch.compiler.is_compiling():
        # The op's schema has no optional tensors: the packed weight stands for None.
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
    """Pack weight ``[O, I]``, or ``[O, I / 2]`` for 4 bits, scales and bias into one tensor."""
    # _tensors stay alive until the library has read their addresses.
    description, _tensors = describe_weight(form, weight, scales, zero_points, bias)
    library = native.library()
    num_bytes = library.packed_bytes(*description)
    packed = host_memory.empty([num_bytes], torch.uint8, lasting=True)
    library.pack(*description, packed.data_ptr())
    return packed, weight.shape[0]


def _pack_compact(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
    description, _tensors = describe_weight(PackedFormat.COMPACT, weight, bias=bias)
    if not native.library().packed_bytes(*description):
        return _pack(PackedFormat.BFLOAT16, weight, bias=bias)
    return _pack(PackedFormat.COMPACT, weight, bias=bias)


def _narrow_exactly(scales: torch.Tensor) -> torch.Tensor:
    """Convert float32 ``scales`` to a 16-bit dtype if one represents all scales exactly."""
    if scales.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = scales.to(dtype)
            if torch.equal(narrow.float(), scales):
                return narrow
    return scales


def _shift_zero_points(zero_points: torch.Tensor | None) -> torch.Tensor | None:
    """Shift int8 zero points by 128 to uint8, as packing shifts the weights."""
    return None if zero_points is None else zero_points.view(torch.uint8) ^ 0x80
