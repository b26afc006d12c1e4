"""Error bounds for results of many steps, by first-order error propagation."""

from __future__ import annotations

import torch
from torch import Tensor


class Errors:
    """First-order bounds of how errors of intermediate results affect the final results.

    A number stored in the storage dtype has an error of its roundings. A sum of products has an
    error of its length times the sum of the absolute terms. Both are in units of roundoff. The
    effect of one error on a result is the derivative of the result by that number; absolute effects
    are summed, and the largest sum over all results counts.
    """

    def __init__(self) -> None:
        # Two sums, as roundings scale with the storage dtype and additions are always in float32.
        self._rounded = self._added = 0.0
        self._points: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(
        self,
        numbers: Tensor,
        roundings: int,
        length: int = 1,
        terms: Tensor | None = None,
        stored: Tensor | None = None,
    ) -> Tensor:
        """Record the possible error of an intermediate result, and return the result.

        Args:
            numbers: the intermediate result.
            roundings: roundings of ``numbers``, or of ``stored``, to the storage dtype.
            length: float32 additions and other operations with an error of one unit.
            terms: sums of absolute terms; None: the absolute ``numbers``.
            stored: the stored numbers that stand for ``numbers``; None: ``numbers``.
        """
        error = torch.zeros_like(numbers, requires_grad=True)
        size = numbers.detach().abs()
        self._points.append(
            (
                error,
                roundings * (size if stored is None else stored.detach()),
                length * (size if terms is None else terms.detach()),
            )
        )
        return numbers + error

    def show(self, results: Tensor) -> None:
        """Compute the error bounds from the derivatives of all results by all recorded errors."""
        errors = [error for error, _, _ in self._points]
        rounded = added = torch.zeros(results.numel(), dtype=results.dtype)
        ones = torch.eye(results.numel(), dtype=results.dtype)
        slopes = torch.autograd.grad(
            results.flatten(), errors, ones, is_grads_batched=True, materialize_grads=True
        )
        for slope, (_, stored, terms) in zip(slopes, self._points, strict=True):
            steepness = slope.flatten(1).abs()
            rounded = rounded + steepness @ stored.flatten()
            added = added + steepness @ terms.flatten()
        self._rounded, self._added = float(rounded.max()), float(added.max())

    def bound(self, dtype: torch.dtype) -> float:
        """Return the bound as a case's ``magnitude`` for intermediate results stored as ``dtype``.

        The residual stream is float32 whatever ``dtype``, so roundings to ``dtype`` are converted
        to float32 units; a magnitude stands for two of these.
        """
        units = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        return (units * self._rounded + self._added) / 2
