"""Rotary position embedding and the tables of its angles.

Dimensions: T tokens, N heads, K kv heads, D head size, R rotated size (R <= D), L positions.
"""

from __future__ import annotations

import torch

from interposer import Tolerance, custom_op
from interposer_ops.cases.rotary import rotary_embedding_cases, rotary_embedding_sample

__all__ = ["rotary_embedding"]


@custom_op(
    "rotary_embedding",
    cases=rotary_embedding_cases,
    tolerance=Tolerance(roundings=3),
    sample=rotary_embedding_sample,
)
def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R elements of every head by its token's angles, in float32 or wider.

    With x = [a, b, rest], a and b of size R/2: y = [a cos - b sin, b cos + a sin, rest].

    Args:
        query: ``[T, N, D]``, any float dtype.
        key: ``[T, K, D]``, dtype of ``query``.
        cos: ``[T, R / 2]``, float32 or wider.
        sin: ``[T, R / 2]``, dtype of ``cos``.
    Returns: rotated ``(query, key)``, contiguous, of their shapes and dtype.
    Source: arXiv:2104.09864.
    """
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    wide = x.to(cos.dtype)
    a, b, rest = wide.tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)
