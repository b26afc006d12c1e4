"""Errors of foreign code: types to catch, safe texts; and a search for similar names."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable

_LONGEST_NAME = 64  # the time to compare names grows with the product of their lengths
_MAX_SHOWN = 3


def foreign_errors() -> tuple[type[BaseException], ...]:
    """Return the exception types that a handler around foreign code must catch.

    Foreign code may derive errors from ``BaseException`` and may call ``sys.exit``, so the result
    is ``(BaseException,)``. The result is empty while Ctrl-C, or the ``GeneratorExit`` of a
    generator of the caller, is being handled.
    """
    # Only the type is trusted: attributes of the error may lie or raise.
    kind, _, trace = sys.exc_info()
    if kind is not None and issubclass(kind, GeneratorExit):
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        # Closing a generator of the caller raises GeneratorExit at a line of the caller.
        module_name = trace.tb_frame.f_globals.get("__name__") if trace is not None else ""
        caller_package = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        return (
            ()
            if type(module_name) is str and module_name.startswith(caller_package)
            else (BaseException,)
        )
    return () if kind is not None and issubclass(kind, KeyboardInterrupt) else (BaseException,)


def described(error: BaseException) -> str:
    """Return the ``repr`` of an error, or its type's name if ``repr`` fails."""
    try:
        return "".join([repr(error)])  # repr may return a subclass of str
    except foreign_errors():
        return f"{type(error).__name__}(...)"


def traced(error: BaseException) -> str:
    """Return the traceback of an error, or its type if formatting the traceback raises."""
    try:
        return "".join(traceback.format_exception(error))
    except foreign_errors():
        return described(error)


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Sort ``known`` by similarity to ``name``, then by name; only by name if ``name`` is long."""
    if len(name) > _LONGEST_NAME:
        return sorted(set(known))

    def distance(candidate: str) -> tuple[float, str]:
        ratio = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        return -ratio, candidate

    return sorted(set(known), key=distance)


def near_names(name: str, known: Iterable[str]) -> str:
    """Format the three known names that are most similar to ``name``, and the number of others."""
    ordered = nearest_first(name, known)
    nearest = ", ".join(map(repr, ordered[:_MAX_SHOWN])) or "(none)"
    num_others = len(ordered) - _MAX_SHOWN
    return f"{nearest}, and {num_others} more" if num_others > 0 else nearest
