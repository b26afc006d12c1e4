"""Linear layers of int8 inputs and int8 or 4-bit weights.

I input features, O output features, G inputs per scale of a weight.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import DEQUANTIZES, standard_op
from interposer_ops.quantized_linear._quantized_linear_cases import WITH_OUT_DTYPE
from interposer_ops.quantizers._small_floats import unpack_nibbles

_op = partial(
    standard_op,
    cases="interposer_ops.quantized_linear._int8_linear_cases",
    emulation=DEQUANTIZES,
    tolerance=Tolerance(WITH_OUT_DTYPE),
    batched=("x", "x_scale", "x_zero_point"),
)


@_op("int8_linear", constants=("weight", "weight_scale", "bias"))
def int8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    x_zero_point: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Project int8 inputs ``x`` by an int8 weight with zero point 0.

    y = ((x - x_zero_point) weight^T) * x_scale * weight_scale + bias; the integer sum is
    exact, and all other steps are float32 or wider.

    Args:
        x: ``[..., I]`` int8.
        weight: ``[O, I]`` int8.
        x_scale, weight_scale, bias, out_dtype: as in ``fp8_linear``.
        x_zero_point: shape of ``x_scale``, int32 between -128 and 127; None for 0.
    Returns: ``[..., O]``, ``out_dtype``.
    Dims: ``in_features``, ``out_features``, ``x_scales`` ("tensor" or "token"), ``weight_scales``
        ("tensor" or "channel"), ``asymmetric``, ``biased``; ``tied``, if ``weight`` is also an
        embedding table.
    """
    shifted = x.int() if x_zero_point is None else x.int() - x_zero_point
    # Exact: float64 holds all integers below 2^53.
    total = functional.linear(shifted.double(), weight.double())
    scaled = total.to(x_scale.dtype) * x_scale * weight_scale
    return (scaled if bias is None else scaled + bias).to(out_dtype)


@_op("w4a8_linear", constants=("weight", "weight_scales", "weight_zero_points", "bias"))
def w4a8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scales: Tensor,
    x_zero_point: Tensor | None,
    weight_zero_points: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Project int8 inputs ``x`` by a weight of 4-bit integers; G inputs share a scale.

    y = sum_g(((x_g - x_zero_point) (weight_g - weight_zero_points_g)^T) * weight_scales_g)
        * x_scale + bias

    The integer sum of each group is exact, and all other steps are float32 or wider.

    Args:
        x, x_scale, x_zero_point, bias, out_dtype: as in ``int8_linear``.
        weight: ``[O, I / 2]`` uint8, two unsigned codes per byte, the code of the first input in
            the low nibble.
        weight_scales: ``[O, I / G]`` float32.
        weight_zero_points: ``[O, I / G]`` uint8 from 0 to 15, not packed; None for 8.
    Returns: ``[..., O]``, ``out_dtype``.
    Dims: ``in_features``, ``out_features``, ``group_size``, ``num_groups``, ``x_scales``
        ("tensor" or "token"), ``asymmetric_inputs``, ``asymmetric_weights``, ``biased``; ``tied``,
        if ``weight`` is also an embedding table.
    """
    shifted = x.int() if x_zero_point is None else x.int() - x_zero_point
    zero = 8 if weight_zero_points is None else weight_zero_points.double().unsqueeze(-1)
    num_groups = weight_scales.shape[1]
    quantized = unpack_nibbles(weight).double()
    groups = quantized.unflatten(1, (num_groups, quantized.shape[1] // num_groups))
    scaled = ((groups - zero) * weight_scales.double().unsqueeze(-1)).flatten(1)
    # Equal to the sums of groups: float64 holds the product of input, code and scale exactly.
    total = functional.linear(shifted.double(), scaled).to(x_scale.dtype) * x_scale
    return (total if bias is None else total + bias).to(out_dtype)
