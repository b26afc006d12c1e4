"""Rotary embedding of tokens that have a place in time, height and width.

Dimensions: T tokens, N heads, K kv heads, D head size, R rotated size (R <= D).
"""

from __future__ import annotations

import torch

from interposer import Tolerance
from interposer_ops._declare import standard_op
from interposer_ops.rotary._rotary import rotated_halves

_CASES = "interposer_ops.rotary._rotary_sections_cases"


@standard_op("multimodal_rotary_embedding", cases=_CASES, tolerance=Tolerance(roundings=3))
def multimodal_rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sections: list[int],
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as ``rotary_embedding`` does, each frequency by the angle of one of three positions.

    The frequencies go to time, height and width, ``sections`` says how many to each: one after the
    other (Qwen2-VL), or ``interleaved`` as time, height, width, time, ... until height and width
    have theirs, and the others to time (Qwen3-VL).

    Args:
        query: ``[T, N, D]``, any float dtype; tokens may skip memory.
        key: ``[T, K, D]``, dtype of ``query``; tokens may skip memory.
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


def _owners(sections: list[int], interleaved: bool) -> list[int]:
    """Return which of the three positions each frequency takes its angle from."""
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    return [
        column % 3 if column < 3 * sections[column % 3] else 0 for column in range(sum(sections))
    ]
