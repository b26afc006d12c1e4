"""Linear layers with 4-bit or 8-bit integer weights and float inputs.

Dequantized weights and sums are float32 or wider.

I input features, O output features, G inputs per scale.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import DEQUANTIZES, standard_op
from interposer_ops.quantizers._small_floats import unpack_nibbles

_op = partial(
    standard_op,
    cases="interposer_ops.quantized_linear._weight_only_linear_cases",
    emulation=DEQUANTIZES,
    constants=("weight", "scale", "bias", "zero_points"),
    tolerance=Tolerance(roundings=2),
    batched=("x",),
)

_DEFAULT_ZERO_POINT = 8  # the middle of the unsigned 4-bit codes


@_op("w4a16_linear")
def w4a16_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, zero_points: Tensor | None = None
) -> Tensor:
    """Project ``x`` by a weight of 4-bit integers.

    y = x ((weight - zero_points) * scale)^T + bias; G inputs of one output share a scale and a
    zero point.

    Args:
        x: ``[..., I]``, any float dtype.
        weight: ``[O, I / 2]`` uint8, two unsigned codes per byte, the code of the first input in
            the low nibble.
        scale: ``[O, I / G]``, float32 or dtype of ``x``.
        bias: ``[O]``, dtype of ``x``, or None.
        zero_points: ``[O, I / G]`` uint8 from 0 to 15, not packed; None for 8.
    Returns: ``[..., O]``, dtype of ``x``.
    Dims: ``in_features``, ``out_features``, ``group_size``, ``num_groups``, ``asymmetric``,
        ``scale_dtype``, ``biased``; ``tied``, if ``weight`` is also an embedding table.
    """
    return _project(x, unpack_nibbles(weight), scale, bias, zero_points, _DEFAULT_ZERO_POINT)


@_op("w8a16_linear")
def w8a16_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, zero_points: Tensor | None = None
) -> Tensor:
    """Project ``x`` by a weight of int8.

    y = x ((weight - zero_points) * scale)^T + bias; G inputs of one output share a scale and a
    zero point.

    Args:
        x, bias: as in ``w4a16_linear``.
        weight: ``[O, I]`` int8.
        scale: ``[O, I / G]`` float32; ``[O, 1]`` or ``[O]`` for one scale per output.
        zero_points: ``[O, I / G]`` int8; None for 0.
    Returns: ``[..., O]``, dtype of ``x``.
    Dims: ``in_features``, ``out_features``, ``group_size``, ``num_groups``, ``asymmetric``,
        ``biased``; ``tied``, if ``weight`` is also an embedding table.
    """
    scales = scale if scale.ndim == 2 else scale.unsqueeze(1)
    return _project(x, weight, scales, bias, zero_points, 0)


def _project(
    x: Tensor,
    quantized: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    zero_points: Tensor | None,
    default_zero_point: int,
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    num_groups = scales.shape[1]
    grouped = quantized.to(wide).unflatten(1, (num_groups, quantized.shape[1] // num_groups))
    zero = default_zero_point if zero_points is None else zero_points.to(wide).unsqueeze(-1)
    dequantized = ((grouped - zero) * scales.to(wide).unsqueeze(-1)).flatten(1)
    offset = None if bias is None else bias.to(wide)
    return functional.linear(x.to(wide), dequantized, offset).to(x.dtype)
