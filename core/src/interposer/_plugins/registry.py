"""The registry: records of all usable plugins as candidates, and plugins registered in code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from interposer._config.config import Config, effective_config
from interposer._config.policy import FIELDS
from interposer._config.rules import Rule
from interposer._contract.choice import Candidate
from interposer._contract.errors import PluginError, UnknownNameError, described, foreign_errors
from interposer._contract.records import (
    AttentionEntry,
    CheckpointEntry,
    CommunicatorEntry,
    Kernel,
    LayerEntry,
    ModelEntry,
    OpEntry,
    PlatformEntry,
    Record,
    SchemeEntry,
    identity,
)
from interposer._contract.request import AttentionType, Kind
from interposer._contract.verdict import Verdict
from interposer._examination.examiner import forget_verdicts
from interposer._examination.inspection import check_plugin
from interposer._examination.task import Task
from interposer._plugins.acceptance import PluginCode, acceptance_of
from interposer._plugins.discovery import discover
from interposer._plugins.plugins import Blame, Plugin, Plugins, Source, in_code
from interposer._validation.records import check_classes
from interposer_sandbox import ForkSafeLock, cached, digest

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Record)

_SUBJECTS: dict[Kind, str] = {
    "kernel": "op",
    "layer": "layer id",
    "attention": "attention type",
    "scheme": "quantization method",
    "model": "architecture",
    "checkpoint": "suffix of files",
    "communicator": "collective",
}
_KINDS: dict[type[Record], Kind] = {
    OpEntry: "kernel",
    Kernel: "kernel",
    LayerEntry: "layer",
    AttentionEntry: "attention",
    SchemeEntry: "scheme",
    ModelEntry: "model",
    CheckpointEntry: "checkpoint",
    PlatformEntry: "platform",
    CommunicatorEntry: "communicator",
}
# The fields that affect discovery and examination; the other fields only affect the selection.
_EXAMINING = ("disable", "plugins", "locked", "isolation", "probe_seconds", "cache_dir")


class Registry:
    """Candidates by kind and subject, built once from the plugins of one discovery.

    Attributes:
        config: settings for the examination of foreign code.
        ops: records of ops by name.
        definers: the plugin that defines each op, by the op's name.
    """

    def __init__(self, plugins: Plugins, config: Config | None = None) -> None:
        self.plugins = plugins
        self.config = config or Config()
        entries = self.records(OpEntry)
        self.ops: dict[str, OpEntry] = {entry.name: entry for _, entry in entries}
        self.definers: dict[str, Plugin] = {entry.name: plugin for plugin, entry in entries}
        self._runs: dict[str, frozenset[str]] = {}
        for _, entry in self.records(PlatformEntry):
            declared_runs = frozenset(entry.runs)
            # Several plugins may declare one platform name; only relations that all declare are
            # safe.
            self._runs[entry.name] = self._runs.get(entry.name, declared_runs) & declared_runs
        self._drivers: dict[str, str] = {}
        self._own_blame = Blame()
        self._code: dict[tuple[str, tuple[str, str, str]], PluginCode] = {}
        self._candidates: dict[Kind, dict[str, list[Candidate]]] = {
            kind: {} for kind in get_args(Kind)
        }
        for plugin in plugins.loaded:
            code = PluginCode(plugins, plugin, self.config, self._drivers_of(plugin))
            for record in plugin.records:
                self._code[plugin.distribution, identity(record)] = code
                self._file(record, code)

    def records(self, kind: type[R]) -> list[tuple[Plugin, R]]:
        """Return all records of one class with the declaring plugins."""
        return [
            (plugin, record)
            for plugin in self.plugins.loaded
            for record in plugin.records
            if isinstance(record, kind)
        ]

    def candidates(self, kind: Kind, subject: str = "") -> list[Candidate]:
        """Return every candidate for a subject; platforms and attention backends have no subject.

        Raises: UnknownNameError: no installed plugin knows the subject.
        """
        subjects = self.subjects(kind)
        if subject and subject not in subjects:
            hint = "Is the plugin for it installed? `interposer doctor` lists the installed ones."
            if kind == "scheme" and (instead := self._recommended_methods(subject)):
                hint = f"It is not supported. Try: a checkpoint of the same model in {instead}"
            raise UnknownNameError(_SUBJECTS[kind], subject, subjects, self._hint(hint))
        return self._candidates[kind].get(subject, [])

    def subjects(self, kind: Kind) -> list[str]:
        """Return the names of one kind that have candidates, such as all quantization methods."""
        return sorted(self.ops if kind == "kernel" else self._candidates[kind])

    def runs(self, platform: str) -> frozenset[str]:
        """Return every platform with records that run on ``platform``.

        The result contains ``platform``, the platforms that all entries of this name declare in
        ``runs``, and the empty string, for records without a platform.
        """
        return self._runs.get(platform, frozenset()) | {"", platform}

    def load(self, candidate: Candidate, target: str) -> Any:
        """Load the object of ``target``, an import string of the candidate's record.

        Raises: PluginError: the object cannot be imported, or must not be.
        """
        return self._code_of(candidate).load(target)

    def examine(self, candidate: Candidate, task: Task) -> Verdict:
        """Examine a candidate's code, or return the remembered verdict."""
        return self._code_of(candidate).examine(task)

    def trial(self, candidate: Candidate, task: Task) -> Verdict:
        """Return whether this process may run a candidate's task; code of the SDK always may."""
        return self._code_of(candidate).trial(task)

    def owner(self, candidate: Candidate) -> Plugin:
        """Return the plugin that declares ``candidate``."""
        return self._code_of(candidate).plugin

    def blame(self, candidate: Candidate) -> Blame:
        """Return the mutable record of failures and wrong results of the candidate's plugin."""
        installed = self.owner(candidate).source.installed
        # All registries of one discovery share the failures of installed plugins.
        return self._own_blame if installed is None else self.plugins.blame

    def driver(self, platform: str) -> str:
        """Return a digest of a platform's driver files; empty if none are declared."""
        if platform not in self._drivers:
            entries = (r for _, r in self.records(PlatformEntry) if r.name == platform)
            files = {Path(file) for record in entries for file in record.driver_files}
            self._drivers[platform] = digest(files)
        return self._drivers[platform]

    def check_rules(self, config: Config) -> None:
        """Raise UnknownNameError for a rule about an unknown op, layer id or type.

        A preferred or forbidden name without any candidate raises too; a glob may match nothing.
        """
        for kind, field in FIELDS.items():
            subjects = get_args(AttentionType) if kind == "attention" else self.subjects(kind)
            rules: dict[str, Rule] = getattr(config, field)
            for key, rule in rules.items():
                name, where = key.partition("@")[0], f"in Config.{field}"
                if name != "*" and name not in subjects:
                    raise UnknownNameError(_SUBJECTS[kind], name, subjects, self._hint(), where)
                _check_values(rule, self._candidates_for(kind, name), f"{where}[{key!r}]")

    def _code_of(self, candidate: Candidate) -> PluginCode:
        return self._code[candidate.provider, identity(candidate.record)]

    def _file(self, record: Record, code: PluginCode) -> None:
        """Add the candidate for ``record`` to the registry, if its kind can be chosen."""
        kind = _KINDS.get(type(record))
        if kind is None:
            return
        _, subject, name = identity(record)
        if isinstance(record, OpEntry):
            subject, name = record.name, "reference"
        candidate = Candidate(
            name,
            code.plugin.distribution,
            code.plugin.version,
            getattr(record, "score", 0.0),
            record,
            acceptance_of(record, code, self.runs),
        )
        named_by = getattr(record, "architectures", None) or getattr(record, "collectives", None)
        for subject_name in dict.fromkeys(named_by or (subject,)):
            self._candidates[kind].setdefault(subject_name, []).append(candidate)

    def _drivers_of(self, plugin: Plugin) -> str:
        """Return the driver digests of the platforms that a plugin's records name."""
        platforms = {getattr(record, "platform", "") for record in plugin.records}
        platforms |= {r.name for r in plugin.records if isinstance(r, PlatformEntry)}
        return " ".join(filter(None, map(self.driver, sorted(platforms))))

    def _recommended_methods(self, method: str) -> str:
        """Return the methods that records recommend instead of an unsupported one."""
        records = (record for _, record in self.records(SchemeEntry))
        return " or ".join(sorted({repr(r.method) for r in records if method in r.instead_of}))

    def _candidates_for(self, kind: Kind, subject: str) -> list[Candidate]:
        by_subject = self._candidates[kind]
        # Every attention backend is a candidate for every attention type.
        if kind == "attention" or subject == "*":
            return [candidate for candidates in by_subject.values() for candidate in candidates]
        return by_subject.get(subject, [])

    def _hint(self, hint: str = "") -> str:
        """Return a line with the failed plugins, one of which may provide the missing name."""
        failed = [f"  {f.name} ({f.distribution}): {f.error.reason}" for f in self.plugins.failed]
        if failed:
            failed.insert(0, "Plugins that failed, one of which may provide it:")
        return "\n".join([hint, *failed] if hint else failed)


@dataclass(eq=False, repr=False)
class Registration:
    """A plugin that was registered in code and can be removed.

    Used as a context manager, it removes the plugin at the end of the block. Objects built with the
    plugin keep working; later objects are built without the plugin.
    """

    source: Source
    plugin: Any
    records: tuple[Record, ...]

    def remove(self) -> None:
        """Remove the plugin; a second call does nothing."""
        global _registered
        with _lock.held:
            _registered = tuple(
                registration for registration in _registered if registration is not self
            )
        _forget_registries()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Registration({self.source.name!r}, {len(self.records)} records)"


_lock = ForkSafeLock()
_registered: tuple[Registration, ...] = ()
_caches: list[cached[Any, Any]] = []


def register(plugin: Any, name: str = "") -> Registration:
    """Register a module or object with hooks as a plugin of this process.

    Hooks, records, targets and classes are checked as for installed plugins. The plugin's name is
    ``name``, or else the object's ``__name__`` or class name.

    Raises:
        PluginError: the plugin cannot be used; the text says why.
        PluginConflictError: another plugin registered in code has the name. A conflict with an
            installed plugin raises at the next use of the plugins.
    """
    source = in_code(plugin, name)
    remedy = "correct it and register it again"
    try:
        records, faults = check_plugin(plugin, source.name)
        faults = faults or check_classes(records)
    except foreign_errors() as error:
        reason = f"it raised {described(error)}"
        raise PluginError(source.name, source.origin, reason, remedy) from error
    if faults:
        raise PluginError(source.name, source.origin, "; ".join(faults), remedy)
    registration = Registration(source, plugin, records)
    global _registered
    with _lock.held:
        # Raises on a conflict with another plugin in code. Conflicts with installed plugins are
        # found at the next use, because registration discovers nothing.
        _with_added(Plugins(), (*_registered, registration))
        _registered = (*_registered, registration)
    return registration


def per_registry(function: Callable[P, T]) -> cached[P, T]:
    """Wrap a function of a registry with a cache that is emptied when registries are dropped."""
    _caches.append(cached(function))
    return _caches[-1]


def current_registry(config: Config | None = None) -> Registry:
    """Return the registry for the effective configuration; repeated calls are cheap.

    Raises:
        PluginError: the configuration is strict and a plugin is quarantined.
        PluginConflictError: a plugin registered in code has the name of an installed one.
        UnknownNameError: the allow list names a distribution that is not installed.
        LockError: the configuration is locked, and the installed plugins differ.
    """
    config = effective_config(config)
    registry = _registry(tuple(getattr(config, name) for name in _EXAMINING), _registered)
    if config.strict and registry.plugins.failed:
        raise registry.plugins.failed[0].error
    return registry


def forget_discovery() -> None:
    """Discover and examine all plugins again at the next use."""
    forget_verdicts()
    _discovered.forget()
    _forget_registries()


def _forget_registries() -> None:
    """Empty the caches of registries and of objects built from plugins, but keep the discovery."""
    for cache in _caches:
        cache.forget()


@per_registry
def _registry(fields: tuple[Any, ...], added: tuple[Registration, ...]) -> Registry:
    plugins = _discovered(fields)
    return Registry(_with_added(plugins, added) if added else plugins, _examining(fields))


# Cached apart from registries, which a change of the plugins in code drops.
@cached
def _discovered(fields: tuple[Any, ...]) -> Plugins:
    return discover(_examining(fields))


def _with_added(plugins: Plugins, added: Iterable[Registration]) -> Plugins:
    return plugins.with_added((r.source, r.plugin, r.records) for r in added)


def _examining(fields: tuple[Any, ...]) -> Config:
    return Config(**dict(zip(_EXAMINING, fields, strict=True)))


def _check_values(rule: Rule, candidates: Iterable[Candidate], where: str) -> None:
    names = {name for c in candidates for name in (c.name, c.qualified_name)}
    for value in (*rule.prefer, *sorted(rule.forbid)):
        if value not in names and not set("*?[") & set(value):
            raise UnknownNameError("candidate", value, names, where=where)
