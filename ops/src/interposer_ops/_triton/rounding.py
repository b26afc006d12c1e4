# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""How kernels divide by a scale and round to what is stored: halves to even, saturating."""

from __future__ import annotations

import triton
import triton.language as tl

from interposer_ops._triton.small_floats import clamped, to_fp8


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
def quantized(
    value,
    scale,
    zero_point,
    largest,
    dtype: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    UNSIGNED_ZERO: tl.constexpr,
):
    """Return ``value / scale`` as int8, the zero point added, or as an 8-bit float without it.

    Args:
        scale: of a shape that broadcasts to that of ``value``, or a scalar.
        zero_point: float32, for int8.
        largest: of the 8-bit float.
        dtype: of the memory that the result goes to; uint8 stands for an 8-bit float.
    """
    quotient = divided(value, scale)
    if dtype == tl.int8:
        total = rounded(quotient) + zero_point
        return tl.minimum(tl.maximum(total, -128.0), 127.0).to(tl.int8)
    else:
        return to_fp8(clamped(quotient, largest), dtype, MANTISSA, BIAS, UNSIGNED_ZERO)
