"""The result of adapting each module of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MAX_LISTED_NAMES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """The result for one module of an adapted model.

    Attributes:
        name: dotted, as in ``named_modules``.
        kind: the name of the module's class.
        kernel: ``provider/name`` of the kernel the module is bound to; "" if the module was
            skipped.
        reason: why the module was skipped; for a bound module a remark, mostly "".
    """

    name: str
    kind: str
    kernel: str = ""
    reason: str = ""

    @property
    def is_bound(self) -> bool:
        """True if the module runs on a kernel that ``adapt`` selected."""
        return bool(self.kernel)


def notes(places: Iterable[Place]) -> Iterator[str]:
    """Yield one line for each reason, naming the first modules that share the reason."""
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for place in places:
        if place.reason:
            groups.setdefault((place.is_bound, place.reason, place.kind), []).append(place.name)
    for (is_bound, reason, kind), names in groups.items():
        listed = ", ".join(name or "(the model)" for name in names[:_MAX_LISTED_NAMES])
        num_unlisted = len(names) - _MAX_LISTED_NAMES
        suffix = f" and {num_unlisted} more" if num_unlisted > 0 else ""
        outcome = "bound" if is_bound else "left as it was"
        yield f"{kind} {listed}{suffix}: {outcome}: {reason}"
