"""The names of features, formats and architectures that any platform is known to declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

from interposer import Capability
from interposer.errors import nearest_first
from interposer.requires import Requires
from interposer_testing.described import DeviceDescription


@dataclass(slots=True)
class Asked:
    """The names that code has looked for in a capability."""

    features: set[str] = field(default_factory=set)
    formats: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names that occur in some description, if any."""

    features: frozenset[str]
    architectures: frozenset[str]
    formats: frozenset[str]

    @classmethod
    def of(cls, devices: Iterable[DeviceDescription]) -> Vocabulary:
        """Return the names that descriptions use."""
        devices = list(devices)
        return cls(
            frozenset(name for device in devices for name in device.features),
            frozenset(device.architecture for device in devices),
            frozenset(name for device in devices for name in device.formats),
        )

    def misspelt(self, features: Iterable[str], formats: Iterable[str]) -> Iterator[str]:
        """Yield a sentence for every name that code has looked for and no described device has."""
        for kind, asked in (("feature", features), ("format", formats)):
            for name in sorted(set(asked) - self._known(kind)):
                yield (
                    f"needs the {kind} {name!r}, which no described device has, so that it may be "
                    f"misspelt; nearest: {self._nearest(kind, name)}"
                )

    def undescribed(self, requires: Requires) -> Iterator[str]:
        """Yield a part of a sentence for every declared name that no described device has."""
        for kind, asked in (
            ("architecture", requires.architectures),
            ("feature", requires.features),
        ):
            for name in sorted(asked - self._known(kind)):
                yield f"the {kind} {name!r} (nearest: {self._nearest(kind, name)})"

    def described_part(self, requires: Requires) -> Requires:
        """Return the requirements without names that no described device has."""
        return replace(
            requires,
            features=requires.features & self.features,
            architectures=requires.architectures & self.architectures,
        )

    def _known(self, kind: str) -> frozenset[str]:
        kinds = {
            "feature": self.features,
            "architecture": self.architectures,
            "format": self.formats,
        }
        return kinds[kind]

    def _nearest(self, kind: str, name: str) -> str:
        return ", ".join(map(repr, nearest_first(name, self._known(kind))[:3])) or "none is known"


def watched(capability: Capability, asked: Asked) -> Capability:
    """Return an equal capability that notes the names it is searched for."""
    features: Any = _Watched(capability.features, asked.features)
    formats: Any = _Watched(capability.formats, asked.formats)
    return replace(capability, features=features, formats=formats)


class _Watched(Set[str]):
    """A frozen set that notes the items it is searched for.

    It is no subclass of one: whatever compares a plain set with it would pass it by.
    """

    def __init__(self, names: frozenset[str], asked: set[str]) -> None:
        self._names = names
        self._asked = asked

    @classmethod
    def _from_iterable(cls, names: Iterable[Any]) -> frozenset[Any]:
        return frozenset(names)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self._asked.add(name)
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __hash__(self) -> int:
        return hash(self._names)

    def issuperset(self, names: Iterable[object]) -> bool:
        return not [name for name in names if name not in self]  # all of them are noted

    def intersection(self, names: Iterable[Any]) -> frozenset[Any]:
        return frozenset([name for name in names if name in self])
