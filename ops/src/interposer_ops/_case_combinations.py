"""Rules that limit the combinations of options for which test cases are generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from interposer_testing.cases import Axis, Point

Valid = Callable[[Point, torch.dtype], bool]


def few_changes(axes: Sequence[Axis], paired: Mapping[str, Sequence[str]], most: int = 2) -> Valid:
    """Return a predicate that accepts test points with few axes changed from the first point.

    A point that differs in one axis is always accepted. A point that differs in 2 to
    ``most`` axes is accepted if ``paired`` lists each changed label under the label's axis;
    an axis that ``paired`` does not mention may change to any label.
    """
    first = {axis.name: next(iter(axis.values)) for axis in axes}

    def valid(point: Point, _: torch.dtype) -> bool:
        changed = {name: label for name, label in point.labels.items() if label != first[name]}
        if len(changed) <= 1:
            return True
        is_paired = all(label in paired.get(name, (label,)) for name, label in changed.items())
        return is_paired and len(changed) <= most

    return valid
