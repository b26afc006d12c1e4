"""An axis of a case space, and a point in the space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from interposer.errors import RecordError

DENSE = "dense"
ORDINARY = "ordinary"


@dataclass(frozen=True, slots=True)
class Axis:
    """The possible values of one property of a case, by label.

    Raises: RecordError: there are no values, or the name is reserved by ``CaseSpace``.
    """

    name: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.values:
            raise RecordError(f"the axis {self.name!r} has no value")
        if self.name in ("dtype", "layout", "special"):
            raise RecordError(f"an axis is named {self.name!r}, which every space has already")


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a case space: one value of every axis, which defines one test case.

    Attributes:
        labels: label by name of the axis.
        values: value by name of the axis.
        layout: memory layout of the arguments.
        special: special values among the arguments, such as NaN.
    """

    labels: Mapping[str, str]
    values: Mapping[str, Any]
    layout: str = DENSE
    special: str = ORDINARY

    def __getitem__(self, axis: str) -> Any:
        """Return the value of the axis named ``axis`` at this point."""
        return self.values[axis]

    @property
    def label(self) -> str:
        """The labels of all axes in one line, unique within the space."""
        labels = [label for label in self.labels.values() if label]
        labels += [self.layout] if self.layout != DENSE else []
        labels += [self.special] if self.special != ORDINARY else []
        return ", ".join(labels) or "plain"

    def coordinates(self) -> tuple[tuple[str, str], ...]:
        """Return (axis, label) pairs, including layout and special values."""
        return (*self.labels.items(), ("layout", self.layout), ("special", self.special))
