"""The names of features, formats and architectures that device descriptions use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

from interposer import Capability
from interposer.errors import nearest_first
from interposer.requires import Requires
from interposer_testing.described import DeviceDescription


@dataclass(slots=True)
class Lookups:
    """Features and formats that plugin code looked up in a ``Capability``."""

    features: set[str] = field(default_factory=set)
    formats: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All features, formats and architectures that at least one device description has."""

    features: frozenset[str]
    architectures: frozenset[str]
    formats: frozenset[str]

    @classmethod
    def of(cls, devices: Iterable[DeviceDescription]) -> Vocabulary:
        """Collect the features, formats and architectures in ``devices``."""
        devices = list(devices)
        return cls(
            frozenset(name for device in devices for name in device.features),
            frozenset(device.architecture for device in devices),
            frozenset(name for device in devices for name in device.formats),
        )

    def misspelt(self, features: Iterable[str], formats: Iterable[str]) -> Iterator[str]:
        """Yield a fault for every name that code looked up and no described device has."""
        for kind, names in (("feature", features), ("format", formats)):
            for name in sorted(set(names) - self._names(kind)):
                yield (
                    f"needs the {kind} {name!r}, which no described device has, so it may be "
                    f"misspelt; nearest: {self._nearest(kind, name)}"
                )

    def undescribed(self, requires: Requires) -> Iterator[str]:
        """Yield a description of every required name that no described device has."""
        for kind, names in (
            ("architecture", requires.architectures),
            ("feature", requires.features),
        ):
            for name in sorted(names - self._names(kind)):
                yield f"the {kind} {name!r} (nearest: {self._nearest(kind, name)})"

    def described_part(self, requires: Requires) -> Requires:
        """Return ``requires`` without features and architectures that no described device has."""
        return replace(
            requires,
            features=requires.features & self.features,
            architectures=requires.architectures & self.architectures,
        )

    def _names(self, kind: str) -> frozenset[str]:
        kinds = {
            "feature": self.features,
            "architecture": self.architectures,
            "format": self.formats,
        }
        return kinds[kind]

    def _nearest(self, kind: str, name: str) -> str:
        return ", ".join(map(repr, nearest_first(name, self._names(kind))[:3])) or "none is known"


def watched(capability: Capability, lookups: Lookups) -> Capability:
    """Return an equal capability that records every looked-up name in ``lookups``."""
    features: Any = _Watched(capability.features, lookups.features)
    formats: Any = _Watched(capability.formats, lookups.formats)
    return replace(capability, features=features, formats=formats)


class _Watched(Set[str]):
    """A frozen set that records every name that is looked up.

    Not a subclass of frozenset: a comparison with a plain set would then bypass the methods below.
    """

    def __init__(self, names: frozenset[str], looked_up: set[str]) -> None:
        self._names = names
        self._looked_up = looked_up

    # ``Set`` calls this for the result of operators such as ``&``.
    @classmethod
    def _from_iterable(cls, names: Iterable[Any]) -> frozenset[Any]:
        return frozenset(names)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self._looked_up.add(name)
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __hash__(self) -> int:
        return hash(self._names)

    def issuperset(self, names: Iterable[object]) -> bool:
        return not [
            name for name in names if name not in self
        ]  # a list, so that all names are recorded

    def intersection(self, names: Iterable[Any]) -> frozenset[Any]:
        return frozenset([name for name in names if name in self])
