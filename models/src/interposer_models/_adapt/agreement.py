"""Numerical comparison of a kernel with the module that it replaces, in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from interposer import Case, Tolerance, Verdict

MAGNITUDES = (1e-2, 1.0, 50.0)
_SEED = 1


def random_signs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random numbers of 1 and -1, the same at every call.

    Every dtype represents 1 and -1 exactly. The dot product of a row of weights with signs is at
    most the row's sum of magnitudes.
    """
    generator = torch.Generator().manual_seed(_SEED)
    bits = torch.randint(0, 2, shape, generator=generator)
    return (2 * bits - 1).to(dtype).to(device)


def random_normals(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random normal numbers with the mean 1/3, the same at every call."""
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) + 1 / 3
    return numbers.to(dtype).to(device)


def check_agreement(
    tolerance: Tolerance,
    expected: Tensor,
    actual: Tensor,
    reduction: int,
    magnitude: float,
    rounded: float = 0.0,
) -> Verdict:
    """Refuse results that differ by more than two correct results can differ.

    Each result may deviate from the exact one by the op's tolerance.

    Args:
        reduction, magnitude, rounded: as of a ``Case``.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Verdict.refuse(
            f"returns {tuple(actual.shape)} {actual.dtype}, "
            f"the module {tuple(expected.shape)} {expected.dtype}"
        )
    reference = expected.double()
    distance = (actual.double() - reference).abs()
    case = Case("", {}, reduction=reduction, magnitude=magnitude, rounded=rounded)
    max_distance = 2 * tolerance.bound(reference, expected.dtype, case)
    if bool((distance <= max_distance).all()):
        return Verdict.accept()
    excess = float(
        (distance / max_distance.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num().max()
    )
    return Verdict.refuse(f"its results are {excess:.1f} times as far away as rounding explains")


def check_calls(
    tolerance: Tolerance,
    original: Callable[[Tensor], Tensor],
    replacement: Callable[[Tensor], Tensor],
    inputs: Tensor,
    reduction: int,
    magnitude: float,
    rounded: float = 0.0,
) -> Verdict:
    """Refuse a replacement that disagrees with the original on ``inputs``, or fails."""
    with torch.no_grad():
        expected = original(inputs)
        actual = replacement(inputs)
    if not isinstance(expected, Tensor):
        return Verdict.refuse(f"returns a tensor, the module a {type(expected).__name__}")
    return check_agreement(tolerance, expected, actual, reduction, magnitude, rounded)
