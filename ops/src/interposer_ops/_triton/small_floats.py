# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Numbers of 8 and 4 bits, made and read by kernels: exact on every architecture.

Quotients are rounded once, halves to even, and saturate.

Where the hardware rounds a float32 to the format in one step, the tensor is given to the kernel as
it is, and triton's conversion is that instruction. Elsewhere triton 3.7.1 goes by way of float16,
which it cuts down to: two roundings, so that what lies just beyond a tie is taken for one. There,
and where triton has no such format at all, the kernel is given the bytes and computes the codes.

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
    """An 8-bit float.

    Attributes:
        mantissa: bits behind the point.
        bias: what the exponent is stored with.
        unsigned_zero: a zero has no sign, and its code with a sign is the one NaN (fnuz).
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
    """Return what is known of an 8-bit float dtype."""
    return _FORMATS[dtype]


def fp8_memory(tensor: Tensor) -> Tensor:
    """Return ``tensor`` where triton rounds to its dtype in one step, else its bytes as uint8."""
    return tensor if _rounds_once(tensor.dtype, tensor.device) else tensor.view(torch.uint8)


@per_device
def _rounds_once(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether triton converts float32 to ``dtype`` by one instruction of the device.

    Those are cvt.rn.satfinite.e4m3x2.f32 and .e5m2x2.f32, and v_cvt_pk_fp8_f32 and _bf8_f32, of
    the fnuz formats on gfx942 and of OCP's on gfx950.
    """
    name = architecture(device)
    if name.startswith("sm_"):
        return int(name[3:].rstrip("af")) >= 90 and not _FORMATS[dtype].unsigned_zero
    return (name, _FORMATS[dtype].unsigned_zero) in (("gfx942", True), ("gfx950", False))


@triton.jit
def clamped(value, largest):
    """Return ``value`` no farther from zero than ``largest``; a NaN stays one."""
    # Comparisons that a NaN fails leave it in its place.
    return tl.where(value > largest, largest, tl.where(value < -largest, -largest, value))


@triton.jit
def to_fp8(
    value,
    dtype: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    UNSIGNED_ZERO: tl.constexpr,
):
    """Return float32 numbers within the format's range as it is stored: numbers, or bytes."""
    if dtype == tl.uint8:
        return fp8_codes(value, MANTISSA, BIAS, UNSIGNED_ZERO)
    else:
        return value.to(dtype)


@triton.jit
def fp8_codes(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, UNSIGNED_ZERO: tl.constexpr):
    """Return the codes, as uint8, of the numbers nearest to ``value``, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    # Exponents as they stand in a float32. What is subnormal has the smallest one.
    lowest: tl.constexpr = (128 - BIAS) << 23
    exponent = tl.maximum(bits & 0x7F800000, lowest)
    # The power of two whose last place is worth as much as that of the format at this exponent:
    # adding it rounds, and what its bits grow by is the result in units of that place.
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
    """Return the codes, as int32, of the e2m1 numbers nearest to ``value``, saturating at 6.

    The code of a magnitude counts the boundaries below it; a tie goes to the even code, so that
    boundaries alternate in the side that they belong to. A zero keeps its sign.
    """
    magnitude = tl.abs(value)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_numbers(code):
    """Return what int32 codes from 0 to 15 stand for, as float32."""
    exponent = (code >> 1) & 3
    normal = (((exponent + 126) << 23) | ((code & 1) << 22)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, (code & 1).to(tl.float32) * 0.5, normal)
    return _signed(magnitude, code >> 3)


@triton.jit
def unpacked(pair, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the int32 codes of ``[ROWS, COLUMNS / 2]`` bytes, that of the low nibble first."""
    wide = pair.to(tl.int32)
    return tl.reshape(tl.join(wide & 15, (wide >> 4) & 15), (ROWS, COLUMNS))


@triton.jit
def _signed(magnitude, sign):
    # Not by a minus, which is a difference from zero and would lose the sign of one.
    bits = magnitude.to(tl.int32, bitcast=True) | (sign << 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def divided(value, divisor):
    """Return the quotient rounded once; ``divisor`` broadcasts to ``value``, or is a scalar."""
    return tl.div_rn(value, tl.zeros_like(value) + divisor)


@triton.jit
def rounded(value):
    """Return the whole numbers nearest to float32 numbers, halves to even."""
    # Between 2^23 and 2^24 the last place of a float32 is worth 1, so that the sum is rounded to
    # it; what is larger is whole already. Triton has no such function for every architecture.
    magnitude = tl.abs(value)
    whole = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    return tl.where(value < 0, -whole, whole)


@triton.jit
def quantized(value, scale, zero_point, largest, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Return ``value / scale`` as int8, the zero point added, or as an 8-bit float without it.

    Args:
        scale: of a shape that broadcasts to that of ``value``, or a scalar.
        zero_point: float32, for int8.
        largest: of the 8-bit float.
        dtype: of the memory that the result goes to; uint8 stands for an 8-bit float.
        FORMAT: the ``Fp8Format``; any for int8.
    """
    quotient = divided(value, scale)
    if dtype == tl.int8:
        total = rounded(quotient) + zero_point
        return tl.minimum(tl.maximum(total, -128.0), 127.0).to(tl.int8)
    else:
        kept = clamped(quotient, largest)
        return to_fp8(kept, dtype, FORMAT.mantissa, FORMAT.bias, FORMAT.unsigned_zero)
