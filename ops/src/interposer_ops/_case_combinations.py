"""Combinations of options that are worth a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from interposer_testing.cases import Axis, Point

Valid = Callable[[Point, torch.dtype], bool]


def few_changes(axes: Sequence[Axis], paired: Mapping[str, Sequence[str]], most: int = 2) -> Valid:
    """Return a rule that keeps the points that differ from the first one in few axes.

    A change of one axis is always kept, changes of up to ``most`` only between labels that are
    named in ``paired`` of their axis; of an axis that is missing there, between all.
    """
    first = {axis.name: next(iter(axis.values)) for axis in axes}

    def valid(point: Point, _: torch.dtype) -> bool:
        changed = {name: label for name, label in point.labels.items() if label != first[name]}
        if len(changed) <= 1:
            return True
        named = all(label in paired.get(name, (label,)) for name, label in changed.items())
        return named and len(changed) <= most

    return valid
