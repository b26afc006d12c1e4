"""Which combinations of options are worth a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from interposer_testing.cases import Axis, Point

Valid = Callable[[Point, torch.dtype], bool]


def combined(axes: Sequence[Axis], paired: Mapping[str, Sequence[str]], most: int = 2) -> Valid:
    """Return a rule that keeps the points that differ from the first one in few axes.

    What differs in one axis is always kept, what differs in up to ``most`` only with labels that
    are named in ``paired`` of their axis; of an axis that is missing there, with all.
    """
    first = {axis.name: next(iter(axis.values)) for axis in axes}

    def valid(point: Point, _: torch.dtype) -> bool:
        changed = [name for name, label in point.labels.items() if label != first[name]]
        if len(changed) <= 1:
            return True
        named = all(
            point.labels[name] in paired.get(name, point.labels.values()) for name in changed
        )
        return named and len(changed) <= most

    return valid
