"""Normalisation of the hidden states over their last dimension. H is the hidden size.

Rows may lie apart in memory. Kernels accumulate in float32 or wider and round the result once.
"""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op

_NORMS_CASES = "interposer_ops.norms._norms_cases"
_LAYER_NORM_CASES = "interposer_ops.norms._layer_norm_cases"


@standard_op(
    "rms_norm",
    cases=_NORMS_CASES,
    constants=("weight",),
    tolerance=Tolerance(roundings=3),
    batched=("x",),
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of ``x`` to unit root mean square, then by ``weight``.

    y = x / sqrt(mean(x^2) + eps) * weight, accumulated in float32 or wider.

    Args:
        x: ``[..., H]``, any float dtype.
        weight: ``[H]``, dtype of ``x``.
    Returns: shape and dtype of ``x``.
    Source: arXiv:1910.07467.
    """
    return _normalise(x, weight, eps).to(x.dtype)


@standard_op(
    "fused_add_rms_norm",
    cases=_NORMS_CASES,
    constants=("weight",),
    tolerance=Tolerance(roundings=4),
    batched=("x", "residual"),
)
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    s = x + residual; y = rms_norm(s, weight, eps)

    The sum is rounded to the residual's dtype before it is normalised, so that the residual that
    is returned is the one that was normalised.

    Args:
        x: ``[..., H]``, any float dtype.
        residual: shape of ``x``; its dtype, or float32 to keep the stream exact.
        weight: ``[H]``, dtype of ``x``.
    Returns: ``(y, s)`` of the shape of ``x``: y in the dtype of ``x``, s in that of ``residual``.
    """
    total = x + residual
    return _normalise(total, weight, eps).to(x.dtype), total


# What is left after the result's own rounding allows one more.
@standard_op(
    "gemma_rms_norm",
    cases=_NORMS_CASES,
    constants=("weight",),
    tolerance=Tolerance(roundings=2),
    batched=("x",),
)
def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of ``x`` to unit root mean square, then by one more than ``weight``.

    y = x / sqrt(mean(x^2) + eps) * (1 + weight), all of it in float32 or wider: neither the row of
    unit length nor 1 + weight is rounded on the way.

    Args:
        x: ``[..., H]``, any float dtype.
        weight: ``[H]``, dtype of ``x``, around zero.
    Returns: shape and dtype of ``x``.
    Dims: hidden_size.
    Source: Gemma's reference implementation, https://github.com/google/gemma_pytorch.
    """
    return _normalise(x, _plus_one(weight), eps).to(x.dtype)


# As gemma_rms_norm; the sum's rounding shows in the element itself and in the row's statistic.
@standard_op(
    "fused_add_gemma_rms_norm",
    cases=_NORMS_CASES,
    constants=("weight",),
    tolerance=Tolerance(roundings=4),
    batched=("x", "residual"),
)
def fused_add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual stream and normalise the sum as Gemma does.

    s = x + residual; y = gemma_rms_norm(s, weight, eps)

    The sum is rounded to the residual's dtype before it is normalised.

    Args:
        x: ``[..., H]``, any float dtype.
        residual: shape of ``x``; its dtype, or float32 to keep the stream exact.
        weight: ``[H]``, dtype of ``x``, around zero.
    Returns: ``(y, s)`` of the shape of ``x``: y in the dtype of ``x``, s in that of ``residual``.
    Dims: hidden_size.
    """
    total = x + residual
    return _normalise(total, _plus_one(weight), eps).to(x.dtype), total


# What is left after the result's own rounding allows one more.
@standard_op(
    "layer_norm",
    cases=_LAYER_NORM_CASES,
    constants=("weight", "bias"),
    tolerance=Tolerance(roundings=2),
    batched=("x",),
)
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Shift and scale each row of ``x`` to mean 0 and variance 1, then by ``weight`` and ``bias``.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, in float32 or wider.

    Args:
        x: ``[..., H]``, any float dtype.
        weight: ``[H]``, dtype of ``x``; None for ones.
        bias: ``[H]``, dtype of ``x``; None for zeros.
    Returns: shape and dtype of ``x``.
    Dims: hidden_size, weighted, biased.
    Source: arXiv:1607.06450.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype)


def _plus_one(weight: torch.Tensor) -> torch.Tensor:
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
