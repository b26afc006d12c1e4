"""Discovery of plugins and the records they declare; a broken one is quarantined, not fatal."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

import importlib_metadata
import pluggy
from packaging.utils import canonicalize_name

from interposer import hookspecs
from interposer.errors import FOREIGN_ERRORS, PluginConflictError, PluginError, nearest_first
from interposer.records import Record, identity

__all__ = ["Failure", "Plugin", "PluginWarning", "Plugins", "discover"]


class PluginWarning(UserWarning):
    """A plugin cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A usable plugin with what it declares."""

    name: str
    distribution: str
    version: str
    records: tuple[Record, ...]

    def summary(self) -> dict[str, int]:
        """Return how many records of each kind the plugin declares."""
        return dict(Counter(type(record).__name__ for record in self.records))


@dataclass(frozen=True, slots=True)
class Failure:
    """A quarantined plugin: the error, and the traceback if its own code raised."""

    name: str
    distribution: str
    version: str
    error: PluginError
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    distribution: str
    version: str
    load: Callable[[], Any]


class Plugins:
    """All plugins of one discovery, and the observers among them."""

    def __init__(self) -> None:
        self.loaded: list[Plugin] = []
        self.failed: list[Failure] = []
        self.skipped: list[tuple[str, str]] = []
        self._manager = pluggy.PluginManager("interposer")
        self._manager.add_hookspecs(hookspecs)
        self._sources: dict[str, _Source] = {}

    def observe(self, hook: str, **facts: Any) -> None:
        """Tell every observer; one that raises is quarantined and never breaks the caller."""
        for implementation in list(getattr(self._manager.hook, hook).get_hookimpls()):
            name = implementation.plugin_name
            if not self._manager.has_plugin(name):
                continue  # another hook of it failed while this one was told
            try:
                implementation.function(**{k: facts[k] for k in implementation.argnames})
            except FOREIGN_ERRORS as error:
                source = self._sources.pop(name, None)
                if source is not None:  # else another thread has just quarantined it
                    self._forget(name)
                    self._quarantine(source, f"its observer {hook} raised {error!r}", error)

    def add(self, source: _Source) -> None:
        """Load one plugin and take its records, or quarantine it."""
        try:
            module = source.load()
        except FOREIGN_ERRORS as error:
            self._quarantine(source, f"its import raised {error!r}", error)
            return
        self._sources[source.name] = source
        try:
            self._manager.register(module, name=source.name)
            self._manager.check_pending()
        except (ValueError, pluggy.PluginValidationError) as error:
            self._forget(source.name)
            self._quarantine(source, f"its hooks are not valid: {error}", error)
            return
        try:
            records = self._records(source.name)
        except FOREIGN_ERRORS as error:
            self._forget(source.name)
            self._quarantine(source, f"interposer_records raised {error!r}", error)
            return
        nonsense = self._nonsense(source, records)
        if nonsense:
            self._forget(source.name)
            self._quarantine(source, f"interposer_records returned {nonsense}")
            return
        self.loaded.append(Plugin(source.name, source.distribution, source.version, tuple(records)))

    def reject(self, source: _Source, rivals: Iterable[_Source]) -> None:
        """Quarantine a plugin whose name is claimed more than once."""
        claims = ", ".join(sorted(f"{r.distribution} {r.version}" for r in rivals))
        error = PluginConflictError(
            source.name,
            source.distribution,
            f"the name {source.name!r} is claimed by {claims}; none of them is used",
            f"uninstall one, or disable one: INTERPOSER_DISABLE={source.distribution}",
        )
        self._record(Failure(source.name, source.distribution, source.version, error))

    def _records(self, name: str) -> list[Record]:
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        caller = self._manager.subset_hook_caller("interposer_records", others)
        return [record for returned in caller() for record in returned]

    def _nonsense(self, source: _Source, records: list[Record]) -> str:
        """Return what is wrong with ``records``, or an empty string."""
        strangers = [record for record in records if not isinstance(record, get_args(Record))]
        if strangers:
            return f"{strangers[0]!r}, not a record"
        neighbours = [p for p in self.loaded if p.distribution == source.distribution]
        declared = [record for plugin in neighbours for record in plugin.records]
        counts = Counter(identity(record) for record in (*declared, *records))
        twice = next((found for found, count in counts.items() if count > 1), None)
        return f"{' '.join(filter(None, twice))} twice" if twice else ""

    def _forget(self, name: str) -> None:
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)

    def _quarantine(self, source: _Source, reason: str, cause: BaseException | None = None) -> None:
        error = PluginError(
            source.name,
            source.distribution,
            reason,
            f"mend or uninstall it, or disable it: INTERPOSER_DISABLE={source.name}",
        )
        trace = "".join(traceback.format_exception(cause)) if cause else ""
        self._record(Failure(source.name, source.distribution, source.version, error, trace))

    def _record(self, failure: Failure) -> None:
        self.failed.append(failure)
        warnings.warn(str(failure.error), PluginWarning, stacklevel=2)
        self.observe(
            "interposer_failed",
            plugin=failure.name,
            distribution=failure.distribution,
            reason=failure.error.reason,
        )


def discover(disabled: frozenset[str] = frozenset(), extra: Iterable[ModuleType] = ()) -> Plugins:
    """Load every installed plugin that is not disabled, and the ``extra`` modules.

    Args:
        disabled: names of plugins or of distributions, normalized as package indexes do.
        extra: plugin modules that are not installed; each goes by its module name.
    """
    plugins = Plugins()
    sources = [*_installed(), *(_in_code(module) for module in extra)]
    disabled_names = {canonicalize_name(name) for name in disabled}
    wanted = []
    for source in sorted(sources, key=lambda s: (s.name, s.distribution, s.version)):
        if not disabled_names.isdisjoint(_names(source)):
            plugins.skipped.append((source.name, source.distribution))
        else:
            wanted.append(source)
    _warn_of_unknown(disabled_names, sources)
    claims = Counter(source.name for source in wanted)
    for source in wanted:
        if claims[source.name] > 1:
            plugins.reject(source, [s for s in wanted if s.name == source.name])
        else:
            plugins.add(source)
    return plugins


def _installed() -> list[_Source]:
    found = {}
    for point in importlib_metadata.entry_points(group=hookspecs.GROUP):
        name = point.dist.name if point.dist else "unknown"
        version = point.dist.version if point.dist else "0"
        found[point.name, name, point.value] = _Source(point.name, name, version, point.load)
    return list(found.values())


def _in_code(module: ModuleType) -> _Source:
    return _Source(module.__name__, module.__name__, "in code", lambda: module)


def _names(source: _Source) -> tuple[str, str]:
    return canonicalize_name(source.name), canonicalize_name(source.distribution)


def _warn_of_unknown(disabled: Iterable[str], sources: list[_Source]) -> None:
    """Warn only: one policy may serve machines that have different plugins installed."""
    known = {name for source in sources for name in _names(source)}
    for name in sorted(set(disabled) - known):
        listed = ", ".join(repr(k) for k in nearest_first(name, known)) or "(none)"
        text = f"The configuration disables {name!r}, which is not installed. Installed: {listed}."
        warnings.warn(text, PluginWarning, stacklevel=3)
