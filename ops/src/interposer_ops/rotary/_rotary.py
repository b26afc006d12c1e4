"""Rotary position embedding (RoPE) of halves (NeoX) and of adjacent pairs (GPT-J).

T tokens, N heads, K kv heads, D head size, R rotated size (R <= D).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op

_op = partial(
    standard_op,
    cases="interposer_ops.rotary._rotary_cases",
    tolerance=Tolerance(roundings=3),
    batch_invariant=True,
    batched=("query", "key", "cos", "sin"),
)


@_op("rotary_embedding", differentiable=("query", "key"))
def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R elements of every head by its token's angles, in float32 or wider.

    With x = [a, b, rest], a and b of size R/2: y = [a cos - b sin, b cos + a sin, rest].

    Args:
        query: ``[T, N, D]``, any float dtype; tokens need not be adjacent in memory.
        key: ``[T, K, D]``, dtype of ``query``; tokens need not be adjacent in memory.
        cos: ``[T, R / 2]``, float32 or wider.
        sin: ``[T, R / 2]``, dtype of ``cos``.
    Returns: rotated ``(query, key)``, contiguous, with shapes and dtype unchanged.
    Dims: head_size, rotary_size.
    Source: arXiv:2104.09864.
    """
    return rotated_halves(query, cos, sin), rotated_halves(key, cos, sin)


@_op("rotary_embedding_interleaved")
def rotary_embedding_interleaved(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate adjacent pairs of the first R elements of every head, in float32 or wider.

    With x = [a1, b1, a2, b2, ..., rest]: y = [a1 cos1 - b1 sin1, b1 cos1 + a1 sin1, ..., rest], as
    GPT-J does.

    Args: those of ``rotary_embedding``.
    Returns: rotated ``(query, key)``, contiguous, with shapes and dtype unchanged.
    Dims: head_size, rotary_size.
    Source: arXiv:2104.09864.
    """
    return _rotate_pairs(query, cos, sin), _rotate_pairs(key, cos, sin)


def rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x``, ``[T, N, D]``, as ``rotary_embedding`` rotates query and key."""
    half = cos.shape[-1]
    a, b, tail = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, tail), dim=-1).to(x.dtype)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    rotary, tail = x.to(cos.dtype).tensor_split((2 * half,), dim=-1)
    a, b = rotary[..., ::2], rotary[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((pairs.flatten(-2), tail), dim=-1).to(x.dtype)
