"""Bounds of errors that numbers on the way leave in the result of many steps."""

from __future__ import annotations

import torch
from torch import Tensor


class Errors:
    """Bounds of what errors of numbers on the way are in the results, to the first order.

    A number that is held in the storage dtype errs by its roundings, a sum of products by its
    length times the sum of the absolute terms, each times a unit of roundoff. What an error of one
    number is in a result is the derivative of that by this; absolute values add up, and the
    largest over all results counts.
    """

    def __init__(self) -> None:
        self._rounded = self._added = 0.0
        self._points: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(
        self,
        numbers: Tensor,
        roundings: int,
        length: int = 1,
        terms: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Tensor:
        """Return ``numbers``, from here on with errors.

        Args:
            roundings: to the storage dtype, of ``numbers`` or of what is ``held`` for them.
            length: additions in float32, and other operations that err by a unit.
            terms: sums of absolute terms; the absolute ``numbers`` without.
        """
        error = torch.zeros_like(numbers, requires_grad=True)
        size = numbers.detach().abs()
        self._points.append(
            (
                error,
                roundings * (size if held is None else held.detach()),
                length * (size if terms is None else terms.detach()),
            )
        )
        return numbers + error

    def show(self, results: Tensor) -> None:
        """Find the bounds for ``results``, one number after the other."""
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
        """Return the bound for numbers stored as ``dtype`` on the way, as a ``magnitude``.

        The residual stream is float32 whatever they are, so that their roundings are counted in its
        unit, of which a magnitude stands for two.
        """
        units = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        return (units * self._rounded + self._added) / 2
