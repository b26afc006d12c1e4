"""Ops of linear layers with MXFP4, MXFP8 or NVFP4 weights.

The scales are in the order of the blocks, not in the tiled order of ``tile_scales``. Dequantized
numbers and sums are float32 or wider; if both operands are quantized, the bias is added before the
rounding.

I input features, O output features.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import DEQUANTIZES, standard_op
from interposer_ops.quantized_linear._quantized_linear_cases import WITH_OUT_DTYPE
from interposer_ops.quantizers._small_floats import decode_e2m1, decode_e8m0, unpack_nibbles

_op = partial(
    standard_op,
    cases="interposer_ops.quantized_linear._block_scaled_linear_cases",
    emulation=DEQUANTIZES,
)
_both_quantized = partial(_op, tolerance=Tolerance(WITH_OUT_DTYPE), batched=("x", "x_scales"))


@_op(
    "mxfp4_linear",
    constants=("weight", "weight_scales", "bias"),
    tolerance=Tolerance(roundings=2),
    batched=("x",),
)
def mxfp4_linear(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """Project float inputs ``x`` by an MXFP4 weight.

    y = x (e2m1(weight) * 2^(weight_scales - 127))^T + bias; 32 inputs share a scale

    Args:
        x: ``[..., I]``, any float dtype; I a multiple of 32.
        weight: ``[O, I / 2]`` uint8, two e2m1 codes per byte, the first input in the low nibble.
        weight_scales: ``[O, I / 32]`` uint8.
        bias: ``[O]``, dtype of ``x``, or None.
    Returns: ``[..., O]``, dtype of ``x``.
    Dims: ``in_features``, ``out_features``, ``biased``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    quantized = decode_e2m1(unpack_nibbles(weight), wide)
    dequantized = _scale_blocks(quantized, decode_e8m0(weight_scales, wide))
    offset = None if bias is None else bias.to(wide)
    return functional.linear(x.to(wide), dequantized, offset).to(x.dtype)


@_both_quantized("mxfp8_linear", constants=("weight", "weight_scales", "bias"))
def mxfp8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Project MXFP8 inputs by an MXFP8 weight.

    y = (x * 2^(x_scales - 127)) (weight * 2^(weight_scales - 127))^T + bias; 32 inputs share a
    scale

    Args:
        x: ``[..., I]`` float8_e4m3fn; I a multiple of 32.
        x_scales: ``[..., I / 32]`` uint8.
        weight: ``[O, I]`` float8_e4m3fn.
        weight_scales: ``[O, I / 32]`` uint8.
        bias, out_dtype: as in ``fp8_linear``.
    Returns: ``[..., O]``, ``out_dtype``.
    Dims: ``in_features``, ``out_features``, ``biased``.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    matmul = functional.linear(
        _scale_blocks(x.to(wide), decode_e8m0(x_scales, wide)),
        _scale_blocks(weight.to(wide), decode_e8m0(weight_scales, wide)),
    )
    return (matmul if bias is None else matmul + bias).to(out_dtype)


@_both_quantized("nvfp4_linear", constants=("weight", "weight_scales", "alpha", "bias"))
def nvfp4_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Project NVFP4 inputs by an NVFP4 weight.

    y = (e2m1(x) * x_scales) (e2m1(weight) * weight_scales)^T * alpha + bias; 16 inputs share a
    scale

    Args:
        x: ``[..., I / 2]`` uint8, two e2m1 codes per byte, the first input in the low nibble; I
            a multiple of 16.
        x_scales: ``[..., I / 16]`` float8_e4m3fn.
        weight: ``[O, I / 2]`` uint8, packed as ``x``.
        weight_scales: ``[O, I / 16]`` float8_e4m3fn.
        alpha: ``[1]`` float32, 1 / (global scale of ``x`` * global scale of ``weight``).
        bias, out_dtype: as in ``fp8_linear``.
    Returns: ``[..., O]``, ``out_dtype``.
    Dims: ``in_features``, ``out_features``, ``biased``.
    """
    wide = alpha.dtype
    matmul = alpha * functional.linear(
        _scale_blocks(decode_e2m1(unpack_nibbles(x), wide), x_scales.to(wide)),
        _scale_blocks(decode_e2m1(unpack_nibbles(weight), wide), weight_scales.to(wide)),
    )
    return (matmul if bias is None else matmul + bias).to(out_dtype)


def _scale_blocks(elements: Tensor, scales: Tensor) -> Tensor:
    """Multiply ``[..., I]`` elements by the ``[..., I / B]`` scales of their blocks."""
    num_blocks = scales.shape[-1]
    blocks = elements.unflatten(-1, (num_blocks, elements.shape[-1] // num_blocks))
    result: Tensor = (blocks * scales.unsqueeze(-1)).flatten(-2)
    return result
