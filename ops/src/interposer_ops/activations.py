"""Gated activations: one half of the input gates the other. T tokens, I intermediate size."""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer import Tolerance, custom_op
from interposer_ops.cases.activations import (
    gelu_and_mul_cases,
    gelu_and_mul_sample,
    silu_and_mul_cases,
    silu_and_mul_sample,
)

__all__ = ["gelu_and_mul", "silu_and_mul"]


@custom_op(
    "silu_and_mul",
    cases=silu_and_mul_cases,
    tolerance=Tolerance(roundings=3),
    sample=silu_and_mul_sample,
)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Multiply the SiLU of the first half by the second half.

    y = g * sigmoid(g) * u where x = [g, u], computed in float32 or wider.

    Args:
        x: ``[..., 2 I]``, any float dtype.
    Returns: ``[..., I]``, dtype of ``x``.
    Source: arXiv:2002.05202.
    """
    gate, up = _halves(x)
    return (functional.silu(gate) * up).to(x.dtype)


@custom_op(
    "gelu_and_mul",
    cases=gelu_and_mul_cases,
    tolerance=Tolerance(roundings=3),
    sample=gelu_and_mul_sample,
)
def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Multiply the GELU of the first half by the second half.

    Args:
        x: ``[..., 2 I]``, any float dtype.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its approximation.
    Returns: ``[..., I]``, dtype of ``x``.
    Source: arXiv:1606.08415.
    """
    gate, up = _halves(x)
    return (functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return gate, up
