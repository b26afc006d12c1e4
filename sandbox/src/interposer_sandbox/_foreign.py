"""The errors of foreign code: which ones to catch, how to show them, and what was meant."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable


def foreign_errors() -> tuple[type[BaseException], ...]:
    """Return what an ``except`` clause around foreign code catches: nearly everything.

    Such code may derive its errors from ``BaseException``, and it may call ``sys.exit``; whoever
    catches these quarantines it. Ctrl-C and the end of a generator are the caller's.
    """
    passing = (KeyboardInterrupt, GeneratorExit)
    return () if isinstance(sys.exc_info()[1], passing) else (BaseException,)


def described(error: BaseException) -> str:
    """Return the ``repr`` of an error, or its type where it has none."""
    try:
        return repr(error)
    except foreign_errors():
        return f"{type(error).__name__}(...)"


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return ``known`` sorted by likeness to ``name``, then by name."""

    def distance(candidate: str) -> tuple[float, str]:
        ratio = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        return -ratio, candidate

    return sorted(set(known), key=distance)
