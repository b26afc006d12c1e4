"""Facts about what became of each module of an adapted model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Place:
    """One module of an adapted model.

    Attributes:
        name: dotted, as ``named_modules`` has it.
        kind: the name of its class.
        kernel: ``provider/name`` of what it is bound to; empty where it was left as it was.
        reason: why it was left; of what is bound, what else is to be said of it, mostly nothing.
    """

    name: str
    kind: str
    kernel: str = ""
    reason: str = ""

    @property
    def is_bound(self) -> bool:
        """True if the module runs on a kernel that was chosen here."""
        return bool(self.kernel)


def notes(places: Iterable[Place]) -> Iterator[str]:
    """Yield a line for each reason, with the modules that share it."""
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for place in places:
        if place.reason:
            groups.setdefault((place.is_bound, place.reason, place.kind), []).append(place.name)
    for (bound, reason, kind), names in groups.items():
        listed = ", ".join(name or "(the model)" for name in names[:_MOST_NAMED])
        left = len(names) - _MOST_NAMED
        more = f" and {left} more" if left > 0 else ""
        did = "bound" if bound else "left as it was"
        yield f"{kind} {listed}{more}: {did}: {reason}"
