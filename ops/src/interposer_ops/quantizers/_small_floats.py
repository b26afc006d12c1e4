"""Encoders and decoders of e2m1 and e8m0, for which torch has no arithmetic.

No function reads the bits of a float, so that every float dtype gives the same codes.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3, 5.4.1 and 6.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MAX = 6.0
_E8M0_BIAS = 127
_E8M0_NAN = 255


def encode_e2m1(x: Tensor) -> Tensor:
    """Encode ``x`` as e2m1: nearest, ties to even, saturating at 6.

    Bit 3 is the sign, also of a zero. The code of a magnitude is the number of rounding boundaries
    below the magnitude. A tie goes to the even code, so that ``>`` and ``>=`` alternate.

    Args:
        x: any shape and float dtype; not NaN.
    Returns: shape of ``x``, uint8 from 0 to 15.
    """
    a = x.abs()
    magnitude = (
        (a > 0.25).to(torch.uint8)
        + (a >= 0.75)
        + (a > 1.25)
        + (a >= 1.75)
        + (a > 2.5)
        + (a >= 3.5)
        + (a > 5)
    )
    return magnitude | (x.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode e2m1 codes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Args:
        codes: any shape, uint8 from 0 to 15.
    Returns: shape of ``codes``, ``dtype``.
    """
    exponent, mantissa = codes >> 1 & 3, codes & 1
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent.clamp(min=1) - 1))
    magnitude = halves.to(dtype) / 2
    return torch.where(codes >= 8, -magnitude, magnitude)


def decode_e8m0(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode e8m0: 2^(e - 127) for a biased exponent e, NaN for 255.

    Args:
        exponents: any shape, uint8.
    Returns: shape of ``exponents``, ``dtype``, float32 or wider.
    """
    ones = torch.ones_like(exponents, dtype=dtype)
    powers = torch.ldexp(ones, exponents.int() - _E8M0_BIAS)
    return powers.masked_fill(exponents == _E8M0_NAN, torch.nan)


def shared_exponents(peaks: Tensor, largest_exponent: int) -> Tensor:
    """Return the biased e8m0 exponents of blocks by the floor rule of OCP MX.

    e = floor(log2(peak)) - largest_exponent + 127, clamped to 0 and 254; 0 for a block of zeros.

    Args:
        peaks: largest magnitude of each block, any shape, float32 or wider, finite.
        largest_exponent: exponent of the largest normal number of the element format.
    Returns: shape of ``peaks``, uint8.
    """
    # frexp has mantissas in [0.5, 1): the exponent is floor(log2(peak)) + 1.
    exponents = torch.frexp(peaks).exponent
    biased = exponents - 1 - largest_exponent + _E8M0_BIAS
    return torch.where(peaks > 0, biased, 0).clamp(0, _E8M0_NAN - 1).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes into bytes, the first code in the low nibble.

    Args:
        codes: ``[..., 2n]`` uint8 from 0 to 15.
    Returns: ``[..., n]`` uint8.
    """
    pairs = codes.unflatten(-1, (codes.shape[-1] // 2, 2))
    packed: Tensor = pairs[..., 0] | pairs[..., 1] << 4
    return packed


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack the two 4-bit codes of every byte, the low nibble first.

    Args:
        packed: ``[..., n]`` uint8.
    Returns: ``[..., 2n]`` uint8 from 0 to 15.
    """
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
