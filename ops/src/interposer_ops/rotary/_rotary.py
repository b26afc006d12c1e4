"""Rotary position embedding and the tables of its angles.

Dimensions: T tokens, N heads, K kv heads, D head size, R rotated size (R <= D).
"""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op

_ROTARY_CASES = "interposer_ops.rotary._rotary_cases"
_ROTARY_TABLES_CASES = "interposer_ops.rotary._rotary_tables_cases"


@standard_op(
    "rotary_embedding",
    cases=_ROTARY_CASES,
    batch_invariant=True,
    tolerance=Tolerance(roundings=3),
    batched=("query", "key", "cos", "sin"),
)
def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R elements of every head by its token's angles, in float32 or wider.

    With x = [a, b, rest], a and b of size R/2: y = [a cos - b sin, b cos + a sin, rest].

    Args:
        query: ``[T, N, D]``, any float dtype; tokens may skip memory.
        key: ``[T, K, D]``, dtype of ``query``; tokens may skip memory.
        cos: ``[T, R / 2]``, float32 or wider.
        sin: ``[T, R / 2]``, dtype of ``cos``.
    Returns: rotated ``(query, key)``, contiguous, of their shapes and dtype.
    Dims: head_size, rotary_size.
    Source: arXiv:2104.09864.
    """
    return rotated_halves(query, cos, sin), rotated_halves(key, cos, sin)


@standard_op(
    "rotary_embedding_interleaved",
    cases=_ROTARY_CASES,
    batch_invariant=True,
    tolerance=Tolerance(roundings=3),
    batched=("query", "key", "cos", "sin"),
)
def rotary_embedding_interleaved(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate neighbours among the first R elements of every head, in float32 or wider.

    With x = [a1, b1, a2, b2, ..., rest]: y = [a1 cos1 - b1 sin1, b1 cos1 + a1 sin1, ..., rest], as
    GPT-J does.

    Args:
        query: ``[T, N, D]``, any float dtype; tokens may skip memory.
        key: ``[T, K, D]``, dtype of ``query``; tokens may skip memory.
        cos: ``[T, R / 2]``, float32 or wider.
        sin: ``[T, R / 2]``, dtype of ``cos``.
    Returns: rotated ``(query, key)``, contiguous, of their shapes and dtype.
    Dims: head_size, rotary_size.
    Source: arXiv:2104.09864.
    """
    return _rotated_pairs(query, cos, sin), _rotated_pairs(key, cos, sin)


@standard_op(
    "rotary_tables",
    cases=_ROTARY_TABLES_CASES,
    tolerance=Tolerance(roundings=6),
    batched=("positions",),
)
def rotary_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the angle of every token and frequency, times ``factor``.

    angle = position * inverse_frequency, which may be rounded to float32: at an angle of 4096 that
    is an error of up to 2e-4. Where the product is a float32, the tables are right to a few units
    in the last place, however large it is.

    Args:
        positions: ``[T]`` int64, from 0 on, below 2^24.
        inverse_frequencies: ``[R / 2]`` float32 or wider, radians per position.
        factor: magnitude of the tables.
    Returns: ``(cos, sin)``, each ``[T, R / 2]``, dtype of ``inverse_frequencies``.
    Dims: rotary_size.
    Source: arXiv:2104.09864; arXiv:2309.00071 (factor).
    """
    angles = positions[:, None].to(inverse_frequencies.dtype) * inverse_frequencies
    return angles.cos() * factor, angles.sin() * factor


def rotated_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return what the op ``rotary_embedding`` does with one of its arguments."""
    half = cos.shape[-1]
    wide = x.to(cos.dtype)
    a, b, rest = wide.tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def _rotated_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    turning, rest = x.to(cos.dtype).tensor_split((2 * half,), dim=-1)
    a, b = turning[..., ::2], turning[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((pairs.flatten(-2), rest), dim=-1).to(x.dtype)
