"""The errors of foreign code: which ones to catch, how to show them, and what was meant."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable

_LONGEST_NAME = 64  # the time to compare names grows with the product of their lengths


def foreign_errors() -> tuple[type[BaseException], ...]:
    """Return what an ``except`` clause around foreign code catches: nearly everything.

    Such code may derive its errors from ``BaseException``, and it may call ``sys.exit``; whoever
    catches these quarantines it. Ctrl-C and the end of a generator are the caller's.
    """
    # By its type alone: the error itself may claim to be of another class, or raise when asked.
    kind, _, trace = sys.exc_info()
    if kind is not None and issubclass(kind, GeneratorExit):
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        # Where a generator of the caller's is ended, it is raised at a line of the caller's.
        place = trace.tb_frame.f_globals.get("__name__") if trace is not None else ""
        own = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        return () if type(place) is str and place.startswith(own) else (BaseException,)
    return () if kind is not None and issubclass(kind, KeyboardInterrupt) else (BaseException,)


def described(error: BaseException) -> str:
    """Return the ``repr`` of an error, or its type where it has none."""
    try:
        return "".join([repr(error)])  # which may be of a class of its own
    except foreign_errors():
        return f"{type(error).__name__}(...)"


def traced(error: BaseException) -> str:
    """Return the traceback of an error, or its type if formatting the traceback raises."""
    try:
        return "".join(traceback.format_exception(error))
    except foreign_errors():
        return described(error)


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return ``known`` sorted by likeness to ``name``, then by name; a long name is like none."""
    if len(name) > _LONGEST_NAME:
        return sorted(set(known))

    def distance(candidate: str) -> tuple[float, str]:
        ratio = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        return -ratio, candidate

    return sorted(set(known), key=distance)
