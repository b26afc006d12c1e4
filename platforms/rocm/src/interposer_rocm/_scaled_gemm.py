"""FP8 GEMM by torch's ``scaled_mm``, which calls hipBLASLt on ROCm.

On gfx942 the hardware multiplies fnuz floats, which have neither infinities nor a negative zero.
OCP floats are reinterpreted as fnuz: the same bits have half the value, so scales are doubled.
Only negative zero and NaN need other bits. Nothing is rounded.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch

from interposer_ops.quantized_linear import fp8_linear_scaled_mm

_NEGATIVE_ZERO_BITS = -128  # 0x80, which is the only NaN of fnuz
_OCP_NAN_BITS = 0x7F  # OCP NaN without the sign bit


def halved(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` / 2 as float8_e4m3fnuz, exactly; ``x`` is float8_e4m3fn.

    The exponent bias of fnuz is 8 instead of 7, so equal bits have half the value. Negative zero
    becomes zero. Both NaN codes become the single NaN of fnuz, which has the bits of negative zero.

    Source: OCP 8-bit Floating Point Specification v1.0; arXiv:2206.02915.
    """
    bits = x.view(torch.int8)
    # Negative zero first: the next line uses these bits for NaN.
    without_negative_zero = bits.masked_fill(bits == _NEGATIVE_ZERO_BITS, 0)
    return without_negative_zero.masked_fill(
        bits & _OCP_NAN_BITS == _OCP_NAN_BITS, _NEGATIVE_ZERO_BITS
    ).view(torch.float8_e4m3fnuz)


def prepare_halves(
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """Convert the weight to half the value in fnuz, and double the weight scale."""
    return {"weight": halved(weight), "weight_scale": weight_scale * 2, "bias": bias}


def fp8_linear_of_halves(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op ``fp8_linear`` by hipBLASLt, with a weight from ``prepare_halves``."""
    return fp8_linear_scaled_mm(halved(x), weight, x_scale * 2, weight_scale, bias, out_dtype)
