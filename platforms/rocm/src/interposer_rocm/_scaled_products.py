"""Products of 8-bit floats by torch's operator for them, which is hipBLASLt here.

On gfx942 the hardware multiplies 8-bit floats without infinities and negative zero (fnuz). Those
of OCP become such ones of half the value with the same bits, but for two codes, and scales twice as
large: nothing is rounded.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch

from interposer_ops.quantized_linear import fp8_linear_scaled_mm

_NEGATIVE_ZERO = -128  # 0x80, which is the only NaN of fnuz
_NAN = 0x7F  # with either sign, of OCP


def halved(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` / 2 as float8_e4m3fnuz, exactly; ``x`` is float8_e4m3fn.

    The exponent's bias is 8 in place of 7, so that equal bits mean half the value. Negative zero
    becomes zero, and both NaN the one of fnuz, whose code negative zero had.

    Source: OCP 8-bit Floating Point Specification v1.0; arXiv:2206.02915.
    """
    bits = x.view(torch.int8)
    changed = bits.masked_fill(bits == _NEGATIVE_ZERO, 0)
    return changed.masked_fill(bits & _NAN == _NAN, _NEGATIVE_ZERO).view(torch.float8_e4m3fnuz)


def prepare_halves(
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """Return the weight halved and its scale doubled; once, after they were loaded."""
    return {"weight": halved(weight), "weight_scale": weight_scale * 2, "bias": bias}


def fp8_linear_of_halves(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``fp8_linear`` of a weight from ``prepare_halves``."""
    return fp8_linear_scaled_mm(halved(x), weight, x_scale * 2, weight_scale, bias, out_dtype)
