"""Quantizers to the microscaling formats. H hidden size.

Blocks of 32 elements of a row share a scale that is a power of two, stored as its exponent plus
127. The elements of a block whose largest magnitude is just below a power of two may exceed the
format, and saturate.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.3.
"""

from __future__ import annotations

from functools import partial

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened
from interposer_ops.quantizers._small_floats import (
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

MX_BLOCK_SIZE = 32
_E4M3_LARGEST_EXPONENT = 8
_E2M1_LARGEST_EXPONENT = 2


@_op("quantize_mxfp8", batch_invariant=True, batched=("x",))
def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` to MXFP8 with e4m3 elements.

    e = floor(log2(max|x_b|)) - 8; q = round(clamp(x / 2^e, -448, 448)), ties to even

    Args:
        x: ``[..., H]``, any float dtype, finite; H a multiple of 32.
    Returns: ``(q, scales)``: shape of ``x`` in float8_e4m3fn, and ``[..., H / 32]`` uint8 that
        hold e + 127; 0 for a block of zeros.
    Dims: ``hidden_size``.
    """
    quotients, scales = _scaled(x, _E4M3_LARGEST_EXPONENT)
    return quotients.clamp(-448, 448).to(torch.float8_e4m3fn), scales


@_op("quantize_mxfp4", batch_invariant=True, batched=("x",))
def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` to MXFP4, two elements per byte.

    e = floor(log2(max|x_b|)) - 2; q = round(clamp(x / 2^e, -6, 6)), ties to even; a zero keeps
    its sign

    Args:
        x: ``[..., H]``, any float dtype, finite; H a multiple of 32.
    Returns: ``(packed, scales)``: ``[..., H / 2]`` uint8 of two e2m1 codes, the first one in the
        low nibble, and ``[..., H / 32]`` uint8 that hold e + 127; 0 for a block of zeros.
    Dims: ``hidden_size``.
    """
    quotients, scales = _scaled(x, _E2M1_LARGEST_EXPONENT)
    return pack_nibbles(encode_e2m1(quotients)), scales


@_op("dequantize_mxfp4", sample=False, batched=("packed", "scales"))
def dequantize_mxfp4(
    packed: torch.Tensor, scales: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers that MXFP4 elements stand for: e2m1 times 2^(scale - 127).

    Args:
        packed: ``[..., H / 2]`` uint8 of two e2m1 codes, the first one in the low nibble.
        scales: ``[..., H / 32]`` uint8; 255 makes its block NaN.
        out_dtype: any float dtype; the products are rounded to it.
    Returns: ``[..., H]``, ``out_dtype``.
    Dims: ``hidden_size``.
    """
    elements = decode_e2m1(unpack_nibbles(packed), torch.float32)
    blocks = elements.unflatten(-1, (scales.shape[-1], MX_BLOCK_SIZE))
    scaled: torch.Tensor = blocks * decode_e8m0(scales, torch.float32).unsqueeze(-1)
    return scaled.flatten(-2).to(out_dtype)


def _scaled(x: torch.Tensor, largest_exponent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x / 2^e and the biased e of each block."""
    wide = widened(x)
    blocks = wide.unflatten(-1, (x.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))
    scales = shared_exponents(blocks.abs().amax(-1), largest_exponent)
    return (blocks / decode_e8m0(scales, wide.dtype).unsqueeze(-1)).flatten(-2), scales
