"""Plugins that are added in code, for the whole process or for a ``with`` block."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from interposer._config.once import cached
from interposer._contract.errors import FOREIGN_ERRORS, PluginError, described
from interposer._contract.records import Record
from interposer._plugins.plugins import Plugins, Source, in_code
from interposer._sandbox.inspection import check_plugin
from interposer._validation.records import check_classes

P = ParamSpec("P")
T = TypeVar("T")

_memos: list[cached[Any, Any]] = []

_lock = Lock()


def _renew_lock() -> None:
    # A forked process lacks the thread that may hold it.
    global _lock
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

_registered: tuple[Registration, ...] = ()


def forget_registries() -> None:
    """Drop what was built from the plugins, but not the discovery itself."""
    for memo in _memos:
        memo.forget()


def per_registry(function: Callable[P, T]) -> cached[P, T]:
    """Return ``function`` of a registry with results remembered until registries are dropped."""
    memo = cached(function)
    _memos.append(memo)
    return memo


class Registration:
    """A plugin that was added in code, until it is removed.

    As a context manager it removes the plugin at the end of the block. What was built with it
    keeps working; what is built afterwards knows nothing of it.
    """

    def __init__(self, source: Source, plugin: Any, records: tuple[Record, ...]) -> None:
        self.source = source
        self.plugin = plugin
        self.records = records

    @property
    def entry(self) -> tuple[Source, Any, tuple[Record, ...]]:
        """Where it is from, the plugin and what it declares."""
        return self.source, self.plugin, self.records

    def remove(self) -> None:
        """Take the plugin out again; doing so twice does nothing."""
        global _registered
        with _lock:
            _registered = tuple(other for other in _registered if other is not self)
        forget_registries()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Registration({self.source.name!r}, {len(self.records)} records)"


def register(plugin: Any, name: str = "") -> Registration:
    """Add a module or object with hooks as a plugin of this process, beside the installed ones.

    It is checked like an installed one, by its hooks, records, targets and classes, and it goes
    by ``name``, or else by its ``__name__`` or the name of its class.

    Raises:
        PluginError: it cannot be used; the text says why.
        PluginConflictError: the name is taken by another that was added in code. One that an
            installed plugin has raises where the plugins are used next.
    """
    source = in_code(plugin, name)
    registration = Registration(source, plugin, _records(source, plugin))
    global _registered
    with _lock:
        # Found here, so that whoever comes second is told.
        Plugins().with_added(r.entry for r in (*_registered, registration))
        _registered = (*_registered, registration)
    return registration


def registrations() -> tuple[Registration, ...]:
    """Return the plugins that are added in code at this moment, in order."""
    return _registered


def _records(source: Source, plugin: Any) -> tuple[Record, ...]:
    """Return the records of ``plugin``; raises PluginError for what is wrong with it."""
    mend = "correct it and register it again"
    try:
        records, faults = check_plugin(plugin, source.name)
        faults = faults or check_classes(records)
    except FOREIGN_ERRORS as error:
        raise PluginError(
            source.name, source.origin, f"it raised {described(error)}", mend
        ) from error
    if faults:
        raise PluginError(source.name, source.origin, "; ".join(faults), mend)
    return records
