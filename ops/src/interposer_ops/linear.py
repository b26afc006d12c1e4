"""Dense projections and table lookup. T tokens, I input features, O output features."""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer import Tolerance, custom_op
from interposer_ops.cases.linear import (
    embedding_cases,
    embedding_sample,
    linear_cases,
    linear_sample,
)

__all__ = ["embedding", "linear"]


@custom_op(
    "linear",
    cases=linear_cases,
    constants=("weight", "bias"),
    tolerance=Tolerance(roundings=2),
    sample=linear_sample,
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Project ``x``: y = x weight^T + bias, accumulated in float32 or wider.

    Args:
        x: ``[..., I]``, any float dtype.
        weight: ``[O, I]``, dtype of ``x``.
        bias: ``[O]``, dtype of ``x``, or None.
    Returns: ``[..., O]``, dtype of ``x``.
    """
    return functional.linear(x, weight, bias)


@custom_op(
    "embedding",
    cases=embedding_cases,
    constants=("weight",),
    tolerance=Tolerance(roundings=0),
    sample=embedding_sample,
)
def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``weight`` that ``token_ids`` name.

    Args:
        token_ids: ``[T]``, int64, each in ``[0, V)``.
        weight: ``[V, H]``, any dtype.
    Returns: ``[T, H]``, dtype of ``weight``.
    """
    return functional.embedding(token_ids, weight)
