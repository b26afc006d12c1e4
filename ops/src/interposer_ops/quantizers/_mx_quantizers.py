"""Quantizers to the microscaling formats and back.

MX: 32 elements of a row share a power-of-two scale, stored as the exponent plus 127. In a block
whose largest magnitude is just below a power of two, elements may exceed the format and saturate.

NVFP4: 16 e2m1 elements of a row share an e4m3 scale. One float32 scale of the tensor brings block
scales into the range of e4m3: x = element * block_scale / global_scale. A common choice is
global_scale = 448 * 6 / max|x|.

H hidden size.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.3; NVIDIA, "Introducing NVFP4
for Efficient and Accurate Low-Precision Inference", 2025.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened
from interposer_ops.quantizers._small_floats import (
    E2M1_MAX,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    pack_nibbles,
    shared_exponents,
    unpack_nibbles,
)

_op = partial(
    standard_op,
    cases="interposer_ops.quantizers._mx_quantizers_cases",
    tolerance=Tolerance(roundings=0),
)

MX_BLOCK_SIZE, NVFP4_BLOCK_SIZE = 32, 16
_E4M3_MAX, _E4M3_LARGEST_EXPONENT = 448.0, 8
_E2M1_LARGEST_EXPONENT = 2


@_op("quantize_mxfp8", batch_invariant=True, batched=("x",))
def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to MXFP8 with e4m3 elements.

    e = floor(log2(max|x_b|)) - 8; q = round(clamp(x / 2^e, -448, 448)), ties to even

    Args:
        x: ``[..., H]``, any float dtype, finite; H a multiple of 32.
    Returns: ``(q, scales)``: shape of ``x`` in float8_e4m3fn, and ``[..., H / 32]`` uint8
        with e + 127; 0 for a block of zeros.
    Dims: ``hidden_size``.
    """
    quotients, scales = _scale_blocks(x, _E4M3_LARGEST_EXPONENT)
    return quotients.clamp(-448, 448).to(torch.float8_e4m3fn), scales


@_op("quantize_mxfp4", batch_invariant=True, batched=("x",))
def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to MXFP4, two elements per byte.

    e = floor(log2(max|x_b|)) - 2; q = round(clamp(x / 2^e, -6, 6)), ties to even; a zero keeps
    its sign

    Args:
        x: ``[..., H]``, any float dtype, finite; H a multiple of 32.
    Returns: ``(packed, scales)``: ``[..., H / 2]`` uint8, two e2m1 codes per byte, the first one in
        the low nibble, and ``[..., H / 32]`` uint8 with e + 127; 0 for a block of zeros.
    Dims: ``hidden_size``.
    """
    quotients, scales = _scale_blocks(x, _E2M1_LARGEST_EXPONENT)
    return pack_nibbles(encode_e2m1(quotients)), scales


@_op("dequantize_mxfp4", sample=False, batched=("packed", "scales"))
def dequantize_mxfp4(packed: Tensor, scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Dequantize MXFP4: e2m1 * 2^(scale - 127).

    Args:
        packed: ``[..., H / 2]`` uint8, two e2m1 codes per byte, the first one in the low nibble.
        scales: ``[..., H / 32]`` uint8; 255 makes its block NaN.
        out_dtype: any float dtype; results are rounded to this dtype.
    Returns: ``[..., H]``, ``out_dtype``.
    Dims: ``hidden_size``.
    """
    elements = decode_e2m1(unpack_nibbles(packed), torch.float32)
    blocks = elements.unflatten(-1, (scales.shape[-1], MX_BLOCK_SIZE))
    scaled: Tensor = blocks * decode_e8m0(scales, torch.float32).unsqueeze(-1)
    return scaled.flatten(-2).to(out_dtype)


@_op("quantize_nvfp4", batch_invariant=True, constants=("global_scale",), batched=("x",))
def quantize_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to NVFP4, two elements per byte.

    s_b = e4m3(min(max|x_b| * global_scale / 6, 448)); q = e2m1(x * global_scale / s_b), which
    saturates and keeps the sign of a zero; q is 0 if s_b is 0. Elements and scales are rounded to
    nearest, ties to even.

    Args:
        x: ``[..., H]``, any float dtype, finite; H a multiple of 16.
        global_scale: ``[1]`` float32, positive.
    Returns: ``(packed, scales)``: ``[..., H / 2]`` uint8, two e2m1 codes per byte, the first one in
        the low nibble, and ``[..., H / 16]`` float8_e4m3fn.
    Dims: ``hidden_size``.
    """
    wide = widened(x)
    blocks = wide.unflatten(-1, (x.shape[-1] // NVFP4_BLOCK_SIZE, NVFP4_BLOCK_SIZE))
    exact_scales = blocks.abs().amax(-1) * global_scale / E2M1_MAX
    scales = exact_scales.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    rounded_scales = scales.to(wide.dtype)
    # A scale of 0 becomes a divisor of infinity: every quotient is a zero with the sign of x.
    divisors = torch.where(rounded_scales > 0, rounded_scales, torch.inf).unsqueeze(-1)
    quantized = encode_e2m1(blocks * global_scale / divisors)
    return pack_nibbles(quantized.flatten(-2)), scales


@_op(
    "dequantize_nvfp4", sample=False, constants=("global_scale",), tolerance=Tolerance(roundings=2)
)
def dequantize_nvfp4(
    packed: Tensor, scales: Tensor, global_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Dequantize NVFP4: e2m1 * scale / global_scale.

    Args:
        packed: ``[..., H / 2]`` uint8, two e2m1 codes per byte, the first one in the low nibble.
        scales: ``[..., H / 16]`` float8_e4m3fn.
        global_scale: ``[1]`` float32, positive.
        out_dtype: any float dtype.
    Returns: ``[..., H]``, ``out_dtype``.
    Dims: ``hidden_size``.
    """
    wide = global_scale.dtype
    elements = decode_e2m1(unpack_nibbles(packed), wide)
    blocks = elements.unflatten(-1, (scales.shape[-1], NVFP4_BLOCK_SIZE))
    scaled: Tensor = blocks * (scales.to(wide) / global_scale).unsqueeze(-1)
    return scaled.flatten(-2).to(out_dtype)


def _scale_blocks(x: Tensor, largest_exponent: int) -> tuple[Tensor, Tensor]:
    """Return x / 2^e and the biased exponent e of each block."""
    wide = widened(x)
    blocks = wide.unflatten(-1, (x.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))
    scales = shared_exponents(blocks.abs().amax(-1), largest_exponent)
    return (blocks / decode_e8m0(scales, wide.dtype).unsqueeze(-1)).flatten(-2), scales
