"""Linear layers of 8-bit floats.

The operands may have different 8-bit dtypes of torch (OCP or fnuz). Sums, scaled in any order, are
float32 or wider; the bias is added before the rounding to ``out_dtype``.

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

_op = partial(
    standard_op,
    cases="interposer_ops.quantized_linear._fp8_linear_cases",
    emulation=DEQUANTIZES,
    tolerance=Tolerance(WITH_OUT_DTYPE),
)


@_op("fp8_linear", constants=("weight", "weight_scale", "bias"), batched=("x", "x_scale"))
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Project 8-bit ``x`` by an 8-bit weight; each has one scale, or one scale per row.

    y = (x weight^T) * x_scale * weight_scale + bias

    Args:
        x: ``[..., I]``, an 8-bit float.
        weight: ``[O, I]``, an 8-bit float.
        x_scale: ``[1]``, or ``[..., 1]`` for one scale per token; float32.
        weight_scale: ``[1]``, or ``[O]`` for one scale per output; float32.
        bias: ``[O]`` in ``out_dtype``, or None.
        out_dtype: float32, bfloat16 or float16.
    Returns: ``[..., O]``, ``out_dtype``.
    Dims: ``in_features``, ``out_features``, ``x_dtype``, ``weight_dtype``, ``x_scales`` ("tensor"
        or "token"), ``weight_scales`` ("tensor" or "channel"), ``biased``.
    """
    wide = x_scale.dtype
    scaled = functional.linear(x.to(wide), weight.to(wide)) * x_scale * weight_scale
    return (scaled if bias is None else scaled + bias).to(out_dtype)


@_op("fp8_block_linear", constants=("weight", "weight_scales", "bias"), batched=("x", "x_scales"))
def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    weight_scales: Tensor,
    block_rows: int,
    block_columns: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Project 8-bit ``x`` by an 8-bit weight, both with one scale per block.

    y = (x * x_scales) (weight * weight_scales)^T + bias

    A block of the weight has R outputs and C inputs; a block of ``x`` has C inputs of one token.
    The last blocks of a dimension may be smaller.

    Args:
        x, weight, bias, out_dtype: as in ``fp8_linear``.
        x_scales: ``[..., ceil(I / C)]`` float32.
        weight_scales: ``[ceil(O / R), ceil(I / C)]`` float32.
        block_rows: R.
        block_columns: C.
    Returns: ``[..., O]``, ``out_dtype``.
    Dims: ``in_features``, ``out_features``, ``block_rows``, ``block_columns``, ``x_dtype``,
        ``weight_dtype``, ``biased``.
    """
    wide = x_scales.dtype
    out_features, in_features = weight.shape
    # The last block of a dimension may be smaller than the others.
    x_factors = x_scales.repeat_interleave(block_columns, -1)[..., :in_features]
    row_scales = weight_scales.repeat_interleave(block_rows, 0)[:out_features]
    weight_factors = row_scales.repeat_interleave(block_columns, 1)[:, :in_features]
    matmul = functional.linear(x.to(wide) * x_factors, weight.to(wide) * weight_factors)
    return (matmul if bias is None else matmul + bias).to(out_dtype)
