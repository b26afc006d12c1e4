"""Rotary position embedding, by one position or three, and the tables of its angles.

Dimensions: T tokens, N heads, K kv heads, D head size, R rotated size (R <= D).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from interposer import Tolerance
from interposer_ops._declare import standard_op

_op = partial(standard_op, cases="interposer_ops.rotary._rotary_cases")
_rotation = partial(_op, tolerance=Tolerance(roundings=3))
_rotation_of_rows = partial(_rotation, batch_invariant=True, batched=("query", "key", "cos", "sin"))


@_rotation_of_rows("rotary_embedding")
def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
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


@_rotation_of_rows("rotary_embedding_interleaved")
def rotary_embedding_interleaved(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate neighbours among the first R elements of every head, in float32 or wider.

    With x = [a1, b1, a2, b2, ..., rest]: y = [a1 cos1 - b1 sin1, b1 cos1 + a1 sin1, ..., rest], as
    GPT-J does.

    Args: those of ``rotary_embedding``.
    Returns: rotated ``(query, key)``, contiguous, of their shapes and dtype.
    Dims: head_size, rotary_size.
    Source: arXiv:2104.09864.
    """
    return _rotated_pairs(query, cos, sin), _rotated_pairs(key, cos, sin)


@_rotation("multimodal_rotary_embedding")
def multimodal_rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, sections: list[int], interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate as ``rotary_embedding`` does, each frequency by the angle of one of three positions.

    The frequencies go to time, height and width, ``sections`` says how many to each: one after the
    other (Qwen2-VL), or ``interleaved`` as time, height, width, time, ... until height and width
    have theirs, and the others to time (Qwen3-VL).

    Args:
        query, key: as in ``rotary_embedding``.
        cos: ``[3, T, R / 2]``, float32 or wider, of the positions in time, height and width.
        sin: ``[3, T, R / 2]``, dtype of ``cos``.
        sections: three numbers, R / 2 together; if interleaved, those of height and width are at
            most R / 6.
        interleaved: says how sections are laid out; the halves of a head turn in either case.
    Returns: rotated ``(query, key)``, contiguous, of their shapes and dtype.
    Dims: head_size, rotary_size, interleaved.
    Source: arXiv:2409.12191 (Qwen2-VL); the models of Qwen3-VL in transformers 5.
    """
    owners = _owners(sections, interleaved)
    columns = list(range(len(owners)))
    own_cos, own_sin = cos[owners, :, columns].T, sin[owners, :, columns].T
    return rotated_halves(query, own_cos, own_sin), rotated_halves(key, own_cos, own_sin)


@_op("rotary_tables", tolerance=Tolerance(roundings=6), batched=("positions",))
def rotary_tables(
    positions: Tensor, inverse_frequencies: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
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


def rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what the op ``rotary_embedding`` does with one of its arguments."""
    half = cos.shape[-1]
    a, b, rest = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    turning, rest = x.to(cos.dtype).tensor_split((2 * half,), dim=-1)
    a, b = turning[..., ::2], turning[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((pairs.flatten(-2), rest), dim=-1).to(x.dtype)


def _owners(sections: list[int], interleaved: bool) -> list[int]:
    """Return which of the three positions each frequency takes its angle from."""
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    return [
        column % 3 if column < 3 * sections[column % 3] else 0 for column in range(sum(sections))
    ]
