# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton functions that encode and decode 8-bit and 4-bit numbers exactly on every architecture.

Quotients are rounded once, halves to even, and saturate.

If the hardware rounds float32 to the format in one step, the kernel takes the tensor as is, and
triton's conversion compiles to that instruction. Otherwise triton 3.7.1 first truncates to float16:
the second rounding then mistakes a number just above a tie for a tie. In that case, and if triton
lacks the format, the kernel takes the tensor as bytes and computes the codes itself.

Source: OCP 8-bit Floating Point Specification (OFP8) v1.0 and, for fnuz, arXiv:2206.02915; OCP
Microscaling Formats (MX) Specification v1.0 (e2m1, e8m0).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from interposer_ops._triton.parameters import architecture, per_device


class Fp8Format(NamedTuple):
    """The layout of an 8-bit float format.

    Attributes:
        mantissa: number of mantissa bits.
        bias: exponent bias.
        unsigned_zero: True if the code of negative zero is the only NaN (fnuz).
        largest: the largest finite number.
    """

    mantissa: int
    bias: int
    unsigned_zero: bool
    largest: float


_FORMATS = {
    torch.float8_e4m3fn: Fp8Format(3, 7, False, 448.0),
    torch.float8_e5m2: Fp8Format(2, 15, False, 57344.0),
    torch.float8_e4m3fnuz: Fp8Format(3, 8, True, 240.0),
    torch.float8_e5m2fnuz: Fp8Format(2, 16, True, 57344.0),
}


def fp8_format(dtype: torch.dtype) -> Fp8Format:
    """Return the layout of an 8-bit float dtype."""
    return _FORMATS[dtype]


def fp8_memory(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a uint8 view if triton does not round to the dtype in one step."""
    return tensor if _rounds_once(tensor.dtype, tensor.device) else tensor.view(torch.uint8)


@per_device
def _rounds_once(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether triton converts float32 to ``dtype`` by one instruction of the device.

    NVIDIA: cvt.rn.satfinite.e4m3x2.f32 and .e5m2x2.f32. AMD: v_cvt_pk_fp8_f32 and _bf8_f32, which
    convert to fnuz formats on gfx942 and to OCP formats on gfx950.
    """
    name = architecture(device)
    if name.startswith("sm_"):
        return int(name[3:].rstrip("af")) >= 90 and not _FORMATS[dtype].unsigned_zero
    return (name, _FORMATS[dtype].unsigned_zero) in (("gfx942", True), ("gfx950", False))


@triton.jit
def clamped(value, largest):
    """Clamp ``value`` to [-``largest``, ``largest``]; a NaN stays a NaN."""
    # Every comparison with a NaN is False, so that the NaN itself is returned.
    return tl.where(value > largest, largest, tl.where(value < -largest, -largest, value))


@triton.jit
def to_fp8(
    value,
    dtype: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    UNSIGNED_ZERO: tl.constexpr,
):
    """Convert float32 numbers within the format's range to ``dtype``, or to codes if uint8."""
    if dtype == tl.uint8:
        return fp8_codes(value, MANTISSA, BIAS, UNSIGNED_ZERO)
    else:
        return value.to(dtype)


@triton.jit
def fp8_codes(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, UNSIGNED_ZERO: tl.constexpr):
    """Encode float32 as 8-bit floats in uint8, rounded to nearest, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    # Exponent bits in place as in float32. Subnormal numbers of the format share the lowest one.
    lowest: tl.constexpr = (128 - BIAS) << 23
    exponent = tl.maximum(bits & 0x7F800000, lowest)
    # A power of two whose last mantissa bit has the value of the format's last mantissa bit at this
    # exponent. Adding the power rounds to that bit, and adds the rounded mantissa to the bits of
    # the power.
    unit = exponent + ((23 - MANTISSA) << 23)
    total = tl.abs(value) + unit.to(tl.float32, bitcast=True)
    code = ((exponent - lowest) >> (23 - MANTISSA)) + total.to(tl.int32, bitcast=True) - unit
    if UNSIGNED_ZERO:
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(value != value, 0x80, code)
    else:
        code = tl.where(value != value, 0x7F, code | sign)
    return code.to(tl.uint8)


@triton.jit
def e2m1_codes(value):
    """Encode ``value`` as e2m1 codes in int32: nearest, ties to even, saturating at 6.

    The code of a magnitude is the number of rounding boundaries below the magnitude. A tie goes to
    the even code, so that ``>`` and ``>=`` alternate. A zero keeps its sign.
    """
    magnitude = tl.abs(value)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_numbers(code):
    """Decode int32 e2m1 codes from 0 to 15 to float32."""
    exponent = (code >> 1) & 3
    normal = (((exponent + 126) << 23) | ((code & 1) << 22)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, (code & 1).to(tl.float32) * 0.5, normal)
    return _signed(magnitude, code >> 3)


@triton.jit
def unpack_codes(pair, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Unpack ``[ROWS, COLUMNS / 2]`` bytes to int32 codes ``[ROWS, COLUMNS]``, low nibble first."""
    wide = pair.to(tl.int32)
    return tl.reshape(tl.join(wide & 15, (wide >> 4) & 15), (ROWS, COLUMNS))


@triton.jit
def _signed(magnitude, sign):
    # Triton compiles ``-x`` to ``0 - x``, which is +0 for x = 0, so set the sign bit instead.
    bits = magnitude.to(tl.int32, bitcast=True) | (sign << 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def divide(value, divisor):
    """Divide with one rounding; ``divisor`` broadcasts to ``value`` or is a scalar."""
    return tl.div_rn(value, tl.zeros_like(value) + divisor)


@triton.jit
def round_half_even(value):
    """Round float32 numbers to integers, halves to even."""
    # Triton has no such function for every architecture. Between 2^23 and 2^24 the last bit of a
    # float32 has the value 1, so that adding 2^23 rounds; larger numbers are integers already.
    magnitude = tl.abs(value)
    integer = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    return tl.where(value < 0, -integer, integer)


@triton.jit
def quantize(value, scale, zero_point, largest, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Quantize to int8, round(value / scale) + zero_point, or to an 8-bit float, value / scale.

    Args:
        scale: a scalar, or a tensor that broadcasts to ``value``.
        zero_point: float32, used for int8 only.
        largest: the largest finite number of the 8-bit float.
        dtype: dtype of the result's memory; uint8 means codes of an 8-bit float.
        FORMAT: the ``Fp8Format``; ignored for int8.
    """
    quotient = divide(value, scale)
    if dtype == tl.int8:
        total = round_half_even(quotient) + zero_point
        return tl.minimum(tl.maximum(total, -128.0), 127.0).to(tl.int8)
    else:
        saturated = clamped(quotient, largest)
        return to_fp8(saturated, dtype, FORMAT.mantissa, FORMAT.bias, FORMAT.unsigned_zero)
