"""Observers. Each takes what it needs of the arguments, as pluggy allows."""

from __future__ import annotations

from typing import Any

from interposer import Choice, hookimpl
from interposer.errors import NoCandidateError

INTERPOSER_API = ">=1.0,<2"

SEEN: list[tuple[Any, ...]] = []


@hookimpl
def interposer_selected(choice: Choice) -> None:
    """Note what was chosen."""
    SEEN.append(("selected", choice.request.kind, choice.request.name, choice.chosen.name))


@hookimpl
def interposer_refused(error: NoCandidateError) -> None:
    """Note what was refused."""
    SEEN.append(("refused", error.what, len(error.refusals)))


@hookimpl
def interposer_failed(plugin: str, reason: str) -> None:
    """Note who failed; of which distribution is left out."""
    SEEN.append(("failed", plugin, reason))


@hookimpl
def interposer_finished(end_ns: int, activity: str) -> None:
    """Note what has ended; the arguments are fewer, and in another order."""
    SEEN.append(("finished", activity, end_ns))
