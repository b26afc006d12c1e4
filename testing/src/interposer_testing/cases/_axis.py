"""One thing that cases differ in, and a combination of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from interposer.errors import RecordError

DENSE = "dense"
ORDINARY = "ordinary"


@dataclass(frozen=True, slots=True)
class Axis:
    """The values that one property of a case takes, by label.

    Raises: RecordError: there is no value, or the name is one of those that a space gives itself.
    """

    name: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.values:
            raise RecordError(f"the axis {self.name!r} has no value")
        if self.name in ("dtype", "layout", "special"):
            raise RecordError(f"an axis is named {self.name!r}, as one that every space has")


@dataclass(frozen=True, slots=True)
class Point:
    """One value of every axis of a space.

    Attributes:
        labels: by the names of the axes.
        values: by the names of the axes.
        layout: how the arguments lie in memory.
        special: which values that are not ordinary numbers stand among the arguments.
    """

    labels: Mapping[str, str]
    values: Mapping[str, Any]
    layout: str = DENSE
    special: str = ORDINARY

    def __getitem__(self, axis: str) -> Any:
        """Return the value on ``axis``."""
        return self.values[axis]

    @property
    def label(self) -> str:
        """Return all labels in one line, unique within the space."""
        own = [label for label in self.labels.values() if label]
        own += [self.layout] * (self.layout != DENSE) + [self.special] * (self.special != ORDINARY)
        return ", ".join(own) or "plain"

    def coordinates(self) -> tuple[tuple[str, str], ...]:
        """Return the pairs of axis and label, layout and special included."""
        return (*self.labels.items(), ("layout", self.layout), ("special", self.special))
