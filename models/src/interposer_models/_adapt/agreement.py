"""Comparison of a replacement with the module that it replaces, at the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from interposer import Case, Tolerance, Verdict

MAGNITUDES = (1e-2, 1.0, 50.0)
_SEED = 1


def signs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random numbers that are 1 or -1, the same ones every time.

    Every dtype holds them exactly, and a row of weights is at most its sum of magnitudes.
    """
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(0, 2, shape, generator=generator)
    return (2 * drawn - 1).to(dtype).to(device)


def normals(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random normal numbers around a third, the same ones every time."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) + 1 / 3
    return drawn.to(dtype).to(device)


def judge_agreement(
    tolerance: Tolerance,
    expected: Tensor,
    found: Tensor,
    reduction: int,
    magnitude: float,
    rounded: float = 0.0,
) -> Verdict:
    """Refuse results that are further apart than two that are each right can be.

    Either may be as far from the exact result as the op's tolerance allows.

    Args:
        reduction, magnitude, rounded: as of a ``Case``.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return Verdict.refuse(
            f"returns {tuple(found.shape)} {found.dtype}, "
            f"the module {tuple(expected.shape)} {expected.dtype}"
        )
    wide = expected.double()
    distance = (found.double() - wide).abs()
    case = Case("", {}, reduction=reduction, magnitude=magnitude, rounded=rounded)
    bound = 2 * tolerance.bound(wide, expected.dtype, case)
    if bool((distance <= bound).all()):
        return Verdict.accept()
    worst = float((distance / bound.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num().max())
    return Verdict.refuse(f"its results are {worst:.1f} times as far away as rounding explains")


def judge_calls(
    tolerance: Tolerance,
    original: Callable[[Tensor], Tensor],
    replacement: Callable[[Tensor], Tensor],
    inputs: Tensor,
    reduction: int,
    magnitude: float,
    rounded: float = 0.0,
) -> Verdict:
    """Refuse a replacement that disagrees with the original on ``inputs``, or fails there."""
    with torch.no_grad():
        expected = original(inputs)
        found = replacement(inputs)
    if not isinstance(expected, Tensor):
        return Verdict.refuse(f"returns a tensor, the module a {type(expected).__name__}")
    return judge_agreement(tolerance, expected, found, reduction, magnitude, rounded)
