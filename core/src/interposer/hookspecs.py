"""The hooks that a plugin may implement, in pluggy's terms.

A plugin is a module or object named by an entry point in the group ``interposer.plugins``. Its
module imports interposer and the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from interposer.choice import Choice
from interposer.errors import NoCandidateError
from interposer.records import Record

__all__ = [
    "GROUP",
    "hookimpl",
    "interposer_failed",
    "interposer_records",
    "interposer_refused",
    "interposer_selected",
]

GROUP = "interposer.plugins"

hookspec = pluggy.HookspecMarker("interposer")
hookimpl = pluggy.HookimplMarker("interposer")


@hookspec
def interposer_records() -> Iterable[Record]:  # type: ignore[empty-body]
    """Return everything that the plugin provides, as declarative records."""


@hookspec
def interposer_selected(choice: Choice) -> None:
    """Observe a choice, once per distinct request of a resolver."""


@hookspec
def interposer_refused(error: NoCandidateError) -> None:
    """Observe a request for which every candidate was refused."""


@hookspec
def interposer_failed(plugin: str, distribution: str, reason: str) -> None:
    """Observe that a plugin was quarantined."""
