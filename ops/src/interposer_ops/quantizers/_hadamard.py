"""The Walsh-Hadamard transform. T rows, H width."""

from __future__ import annotations

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops._widening import widened

_CASES = "interposer_ops.quantizers._hadamard_cases"


@standard_op("hadamard_transform", cases=_CASES, tolerance=Tolerance(roundings=2), batched=("x",))
def hadamard_transform(x: Tensor, scale: float) -> Tensor:
    """Multiply each row by the Hadamard matrix of its width, in Sylvester's order, and ``scale``.

    y[i] = scale sum over j of (-1)^(number of ones among the bits of i and j) x[j], accumulated in
    float32 or wider.

    Args:
        x: ``[..., H]``, any float dtype, H a power of two; rows may skip memory.
        scale: H^-0.5 keeps the lengths of rows.
    Returns: shape and dtype of ``x``.
    Dims: hidden_size.
    Source: arXiv:2404.00456 (rotation of activations).
    """
    width = x.shape[-1]
    y = widened(x)
    half = 1
    while half < width:
        first, second = y.unflatten(-1, (width // (2 * half), 2, half)).unbind(-2)
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return (scale * y).to(x.dtype)
