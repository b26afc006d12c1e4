"""Quantizers of activations to int8.

(q - zero_point) * scale dequantizes. Quotients are rounded to nearest, ties to even, before the
zero point is added, as in ONNX's QuantizeLinear; sums saturate.

H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened

_op = partial(
    standard_op,
    cases="interposer_ops.quantizers._int8_quantizers_cases",
    tolerance=Tolerance(roundings=0),
    batched=("x",),
)


@_op("quantize_int8_static", sample=False)
def quantize_int8_static(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Quantize ``x`` to int8 by a static scale and zero point.

    q = clamp(round(x / scale) + zero_point, -128, 127)

    Args:
        x: ``[..., H]``, any float dtype; infinities saturate; NaN is not supported.
        scale: ``[1]`` float32.
        zero_point: ``[1]`` int32, or None for 0.
    Returns: shape of ``x``, int8.
    Dims: ``hidden_size``, ``asymmetric``.
    """
    rounded = (widened(x) / scale).round()
    return _saturate(rounded if zero_point is None else rounded + zero_point)


@_op("quantize_int8_per_token", batch_invariant=True)
def quantize_int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to int8 with one dynamic scale per row.

    scale = max|x_t| / 127, 1 for a row of zeros; q = round(x / scale)

    Args:
        x: ``[..., H]``, any float dtype, finite.
    Returns: ``(q, scale)``: shape of ``x`` in int8, and ``[..., 1]`` float32.
    Dims: ``hidden_size``.
    """
    wide = widened(x)
    peak = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(peak > 0, peak / 127, 1.0)
    return _saturate((wide / scale).round()), scale


@_op("quantize_int8_per_token_asymmetric", batch_invariant=True)
def quantize_int8_per_token_asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``x`` to int8 with a dynamic scale and zero point per row.

    low = min(min(x_t), 0), high = max(max(x_t), 0); scale = (high - low) / 255, 1 for a row of
    zeros; zero_point = round(-128 - low / scale); q = clamp(round(x / scale) + zero_point, -128,
    127). The range includes 0, so that 0 is represented exactly.

    Args:
        x: ``[..., H]``, any float dtype, finite.
    Returns: ``(q, scale, zero_point)``: shape of ``x`` in int8, ``[..., 1]`` float32, and
        ``[..., 1]`` int32.
    Dims: ``hidden_size``.
    """
    wide = widened(x)
    low = wide.amin(-1, keepdim=True).clamp(max=0)
    high = wide.amax(-1, keepdim=True).clamp(min=0)
    scale = torch.where(high > low, (high - low) / 255, 1.0)
    zero_point = (-128 - low / scale).round()
    return _saturate((wide / scale).round() + zero_point), scale, zero_point.to(torch.int32)


def _saturate(rounded: Tensor) -> Tensor:
    return rounded.clamp(-128, 127).to(torch.int8)
