"""Activations: elementwise, and gated, where one half of the input gates the other half.

All activations are computed in float32 or wider and rounded once. Rows need not be adjacent in
memory.

T tokens, I intermediate size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened

_op = partial(standard_op, cases="interposer_ops.activations._activations_cases", batched=("x",))
# A kernel may round the activation and the result; the last rounding is for the error of float32.
_single = partial(_op, tolerance=Tolerance(roundings=2))
_gated = partial(_op, tolerance=Tolerance(roundings=3))


@_single("gelu", differentiable=("x",))
def gelu(x: Tensor, approximate: str) -> Tensor:
    """Apply GELU: multiply each element by the standard normal distribution function.

    y = x / 2 * (1 + erf(x / sqrt(2))), or x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    Args:
        x: ``[..., I]``, any float dtype.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its approximation.
    Returns: shape and dtype of ``x``.
    Dims: intermediate_size, approximate.
    Source: arXiv:1606.08415.
    """
    return functional.gelu(widened(x), approximate=approximate).to(x.dtype)


@_single("quick_gelu")
def quick_gelu(x: Tensor) -> Tensor:
    """Approximate GELU by a sigmoid: y = x * sigmoid(1.702 x).

    Args: ``x``, as in ``gelu``.
    Returns: shape and dtype of ``x``.
    Dims: intermediate_size.
    Source: arXiv:1606.08415, section 2.
    """
    wide = widened(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


@_single("relu2", batch_invariant=True)
def relu2(x: Tensor) -> Tensor:
    """Apply squared ReLU: y = max(x, 0)^2.

    Args: ``x``, as in ``gelu``.
    Returns: shape and dtype of ``x``.
    Dims: intermediate_size.
    Source: arXiv:2109.08668 (Primer).
    """
    return widened(x).relu().square().to(x.dtype)


@_gated("silu_and_mul", differentiable=("x",))
def silu_and_mul(x: Tensor) -> Tensor:
    """Multiply the SiLU of the first half by the second half.

    y = g * sigmoid(g) * u where x = [g, u], computed in float32 or wider.

    Args:
        x: ``[..., 2 I]``, any float dtype.
    Returns: ``[..., I]``, dtype of ``x``.
    Dims: intermediate_size.
    Source: arXiv:2002.05202.
    """
    gate, up = _halves(x)
    return (functional.silu(gate) * up).to(x.dtype)


# The cases avoid results so close to a rounding boundary that kernels may round differently.
@_op("silu_and_mul_quantize_fp8", tolerance=Tolerance(roundings=0))
def silu_and_mul_quantize_fp8(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply the SiLU of the first half by the second half, and quantize by one scale.

    q = round(clamp(silu_and_mul(x) / scale, -m, m)), halves to even, where m is the largest number
    of ``out_dtype``. The product is not rounded to the dtype of ``x`` first.

    Args:
        x: ``[..., 2 I]``, any float dtype of at least 16 bits.
        scale: ``[1]``, float32, above 0: the value of a quantized 1.
        out_dtype: an 8-bit float dtype.
    Returns: ``[..., I]``, ``out_dtype``.
    Dims: intermediate_size, out_dtype.
    Source: arXiv:2209.05433 for the number formats; arXiv:2002.05202 for the activation.
    """
    gate, up = _halves(x)
    largest = torch.finfo(out_dtype).max
    return (functional.silu(gate) * up / scale).clamp(-largest, largest).to(out_dtype)


@_gated("gelu_and_mul", differentiable=("x",))
def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """Multiply the GELU of the first half by the second half.

    Args:
        x: ``[..., 2 I]``, any float dtype.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its approximation.
    Returns: ``[..., I]``, dtype of ``x``.
    Dims: intermediate_size, approximate.
    Source: arXiv:1606.08415.
    """
    gate, up = _halves(x)
    return (functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


@_gated("swiglu_oai_and_mul")
def swiglu_oai_and_mul(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Apply the clamped SwiGLU of gpt-oss to interleaved gate and up elements.

    y = (u + 1) * g * sigmoid(alpha * g), where g = min(x[2 i], limit) has no lower limit and
    u = x[2 i + 1] is clamped to [-limit, limit].

    Args:
        x: ``[..., 2 I]``, any float dtype: gates at even, up projections at odd positions.
        alpha: 1.702 in gpt-oss.
        limit: above 0; 7 in gpt-oss.
    Returns: ``[..., I]``, dtype of ``x``.
    Dims: intermediate_size.
    Source: arXiv:2508.10925 and https://github.com/openai/gpt-oss.
    """
    wide = widened(x)
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(x.dtype)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = widened(x).chunk(2, dim=-1)
    return first, second
