"""The description of a wrong kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["WRONG", "Wrong", "wrong"]


@dataclass(frozen=True)
class Wrong:
    """One kernel and how it must be found out.

    Attributes:
        function: has the signature of the op.
        checks: the kinds of fault that name what is wrong; one of them must be reported.
        axis: the only axis along which the kernel shows itself, so that without its further values
            nobody would notice; empty where it is wrong everywhere.
        says: words that occur in a fault.
        aspect: the aspect of the suite that finds it.
        properties: what it claims.
    """

    name: str
    op: str
    function: Callable[..., Any]
    checks: frozenset[str]
    axis: str
    says: str
    aspect: str
    properties: frozenset[str]


WRONG: list[Wrong] = []


def wrong(
    op: str,
    *checks: str,
    axis: str = "",
    says: str = "",
    aspect: str = "numerics",
    properties: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to ``WRONG``; its name says what is wrong."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        kinds, claims = frozenset(checks), frozenset(properties)
        WRONG.append(Wrong(name, op, function, kinds, axis, says, aspect, claims))
        return function

    return add
