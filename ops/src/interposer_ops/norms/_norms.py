"""Normalisation of the hidden states over their last dimension.

H hidden size. Rows need not be adjacent in memory. Kernels accumulate in float32 or wider and round
the result once.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened

_op = partial(
    standard_op, cases="interposer_ops.norms._norms_cases", constants=("weight",), batched=("x",)
)


@_op("rms_norm", tolerance=Tolerance(roundings=3), differentiable=("x", "weight"))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of ``x`` to unit root mean square, then by ``weight``.

    y = x / sqrt(mean(x^2) + eps) * weight, accumulated in float32 or wider.

    Args:
        x: ``[..., H]``, any float dtype.
        weight: ``[H]``, dtype of ``x``.
    Returns: shape and dtype of ``x``.
    Dims: hidden_size.
    Source: arXiv:1910.07467.
    """
    return (unit_rows(x, eps) * weight).to(x.dtype)


@_op("fused_add_rms_norm", tolerance=Tolerance(roundings=4), batched=("x", "residual"))
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    s = x + residual; y = rms_norm(s, weight, eps)

    The sum is rounded to the residual's dtype before the norm, so that ``y`` is the norm of the
    returned residual.

    Args:
        x: ``[..., H]``, any float dtype.
        residual: shape of ``x``; dtype of ``x``, or float32 to keep the residual stream exact.
        weight: ``[H]``, dtype of ``x``.
    Returns: ``(y, s)`` of the shape of ``x``: y in the dtype of ``x``, s in that of ``residual``.
    Dims: hidden_size, residual_dtype.
    """
    total = x + residual
    return (unit_rows(total, eps) * weight).to(x.dtype), total


# One rounding of the result, and one more for the error of the computation before it.
@_op("gemma_rms_norm", tolerance=Tolerance(roundings=2))
def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of ``x`` to unit root mean square, then by ``1 + weight``.

    y = x / sqrt(mean(x^2) + eps) * (1 + weight), computed in float32 or wider: neither the
    normalised row nor 1 + weight is rounded to the dtype of ``x``.

    Args:
        x: ``[..., H]``, any float dtype.
        weight: ``[H]``, dtype of ``x``, around zero.
    Returns: shape and dtype of ``x``.
    Dims: hidden_size.
    Source: Gemma's reference implementation, https://github.com/google/gemma_pytorch.
    """
    return (unit_rows(x, eps) * (1 + widened(weight))).to(x.dtype)


# As gemma_rms_norm; the sum's rounding shows in the element itself and in the row's statistic.
@_op("fused_add_gemma_rms_norm", tolerance=Tolerance(roundings=4), batched=("x", "residual"))
def fused_add_gemma_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalise the sum by Gemma's RMS norm.

    s = x + residual; y = gemma_rms_norm(s, weight, eps)

    The sum is rounded to the residual's dtype before the norm.

    Args: those of ``fused_add_rms_norm``; ``weight`` is around zero.
    Returns: those of ``fused_add_rms_norm``.
    Dims: hidden_size, residual_dtype.
    """
    total = x + residual
    return (unit_rows(total, eps) * (1 + widened(weight))).to(x.dtype), total


# One rounding of the result, and one more for the error of the computation before it.
@_op(
    "layer_norm",
    tolerance=Tolerance(roundings=2),
    constants=("weight", "bias"),
    differentiable=("x", "weight", "bias"),
)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise each row of ``x`` to mean 0 and variance 1, then apply ``weight`` and ``bias``.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, in float32 or wider.

    Args:
        x: ``[..., H]``, any float dtype.
        weight: ``[H]``, dtype of ``x``; None for ones.
        bias: ``[H]``, dtype of ``x``; None for zeros.
    Returns: shape and dtype of ``x``.
    Dims: hidden_size, weighted, biased.
    Source: arXiv:1607.06450.
    """
    wide = widened(x)
    y = unit_rows(wide - wide.mean(-1, keepdim=True), eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype)


# The cases avoid results so close to a rounding boundary that kernels may round differently.
@_op("rms_norm_quantize_fp8", tolerance=Tolerance(roundings=0))
def rms_norm_quantize_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype
) -> Tensor:
    """Normalise each row of ``x`` and quantize the result by one scale.

    q = round(clamp(rms_norm(x, weight, eps) / scale, -m, m)), halves to even, where m is the
    largest number of ``out_dtype``. The normalised row is not rounded to the dtype of ``x`` first.

    Args:
        x: ``[..., H]``, any float dtype of at least 16 bits; rows need not be adjacent.
        weight: ``[H]``, dtype of ``x``.
        scale: ``[1]``, float32, above 0: the value of a quantized 1.
        out_dtype: an 8-bit float dtype.
    Returns: shape of ``x``, ``out_dtype``.
    Dims: hidden_size, out_dtype.
    Source: arXiv:2209.05433 for the number formats; arXiv:1910.07467 for the norm.
    """
    largest = torch.finfo(out_dtype).max
    return (unit_rows(x, eps) * weight / scale).clamp(-largest, largest).to(out_dtype)


# The sum is exact in the dtypes of the cases, so that the sum is compared exactly too.
@_op(
    "fused_add_rms_norm_quantize_fp8",
    tolerance=Tolerance(roundings=0),
    batched=("x", "residual"),
)
def fused_add_rms_norm_quantize_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream, normalise the sum and quantize the result by one scale.

    s = x + residual; q = rms_norm_quantize_fp8(s, weight, scale, eps, out_dtype)

    Args:
        x: ``[..., H]``, any float dtype of at least 16 bits.
        residual: shape of ``x``, float32 or wider.
        weight: ``[H]``, dtype of ``x``.
        scale: ``[1]``, float32, above 0: the value of a quantized 1.
        out_dtype: an 8-bit float dtype.
    Returns: ``(q, s)`` of the shape of ``x``: q in ``out_dtype``, s in the dtype of ``residual``.
    Dims: hidden_size, residual_dtype, out_dtype.
    Source: as of ``rms_norm_quantize_fp8``.
    """
    total = x + residual
    return rms_norm_quantize_fp8(total, weight, scale, eps, out_dtype), total


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """Scale the rows of ``x`` to unit root mean square, in float32 or wider."""
    wide = widened(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
