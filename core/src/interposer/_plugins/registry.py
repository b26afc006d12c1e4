"""The records of all usable plugins, as candidates for the selection."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from interposer._config.config import Config, effective_config
from interposer._config.once import cached
from interposer._config.rules import Rule
from interposer._contract.choice import Candidate
from interposer._contract.errors import UnknownNameError
from interposer._contract.records import (
    AttentionEntry,
    CheckpointEntry,
    Kernel,
    LayerEntry,
    OpEntry,
    PlatformEntry,
    Record,
    SchemeEntry,
    identity,
)
from interposer._contract.request import AttentionType, Kind
from interposer._contract.verdict import Verdict
from interposer._plugins.acceptance import acceptance_of
from interposer._plugins.code import PluginCode
from interposer._plugins.discovery import discover
from interposer._plugins.plugins import Blame, Plugin, Plugins
from interposer._plugins.registration import (
    Registration,
    forget_registries,
    per_registry,
    registrations,
)
from interposer._sandbox.examiner import forget_verdicts
from interposer._sandbox.task import Task

R = TypeVar("R", bound=Record)

_SUBJECTS: dict[Kind, str] = {
    "kernel": "op",
    "layer": "layer id",
    "scheme": "quantization method",
    "checkpoint": "suffix of files",
}
# What discovery and examination depend on; everything else of a Config is for the selection.
_FIELDS = ("disable", "plugins", "locked", "isolation", "probe_seconds", "cache_dir")


class Registry:
    """Candidates by kind and subject; built once from the plugins of one discovery.

    Attributes:
        config: how foreign code is examined before it is loaded.
        ops: by name.
    """

    def __init__(self, plugins: Plugins, config: Config | None = None) -> None:
        self.plugins = plugins
        self.config = config or Config()
        self.ops: dict[str, OpEntry] = {r.name: r for _, r in self.records(OpEntry)}
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
        """Return all records of one class with the plugins that declare them."""
        return [
            (plugin, record)
            for plugin in self.plugins.loaded
            for record in plugin.records
            if isinstance(record, kind)
        ]

    def candidates(self, kind: Kind, subject: str = "") -> list[Candidate]:
        """Return every candidate for an op, a layer id, a quantization method or a suffix.

        Platforms and attention backends have no subject.

        Raises: UnknownNameError: no installed plugin knows the subject.
        """
        known = self.ops if kind == "kernel" else self._candidates[kind]
        if subject and subject not in known:
            hint = "Is the plugin for it installed? `interposer doctor` says what is."
            if kind == "scheme" and (instead := self._instead(subject)):
                hint = f"It is not read. Try: a checkpoint of the same model in {instead}"
            raise UnknownNameError(_SUBJECTS[kind], subject, known, self._hint(hint))
        return self._candidates[kind].get(subject, [])

    def subjects(self, kind: Kind) -> list[str]:
        """Return the ops, layer ids, quantization methods or suffixes that have candidates."""
        return sorted(self.ops if kind == "kernel" else self._candidates[kind])

    def load(self, candidate: Candidate, target: str) -> Any:
        """Return the object of ``target``, an import string of the candidate's record.

        Raises: PluginError: it cannot be imported, or must not be.
        """
        return self._code_of(candidate).load(target)

    def examine(self, candidate: Candidate, task: Task) -> Verdict:
        """Return what an examination of a candidate's code found, remembered where it can be."""
        return self._code_of(candidate).examine(task)

    def owner(self, candidate: Candidate) -> Plugin:
        """Return the plugin that declares ``candidate``."""
        return self._code_of(candidate).plugin

    def blame(self, candidate: Candidate) -> Blame:
        """Return the notes on a candidate's kernels that were made while they were used."""
        installed = self.owner(candidate).source.installed
        return self._own_blame if installed is None else self.plugins.blame

    def driver(self, platform: str) -> str:
        """Return what tells the drivers of a platform apart; empty where it declares none."""
        if platform not in self._drivers:
            entries = (r for _, r in self.records(PlatformEntry) if r.name == platform)
            files = {Path(file) for record in entries for file in record.driver_files}
            self._drivers[platform] = _digest(files)
        return self._drivers[platform]

    def check_rules(self, config: Config) -> None:
        """Raise UnknownNameError for a rule on an op, layer id or type that nobody knows.

        So does a preferred or forbidden name that no candidate has; a glob may match nothing.
        """
        fields: tuple[tuple[str, Kind, str, Iterable[str]], ...] = (
            ("kernels", "kernel", "op", self.ops),
            ("layers", "layer", "layer id", self._candidates["layer"]),
            ("attention", "attention", "attention type", get_args(AttentionType)),
            ("quantization", "scheme", "quantization method", self._candidates["scheme"]),
        )
        for field, kind, what, known in fields:
            rules: Mapping[str, Rule] = getattr(config, field)
            for key, rule in rules.items():
                name, where = key.partition("@")[0], f"in Config.{field}"
                if name != "*" and name not in known:
                    raise UnknownNameError(what, name, known, self._hint(), where)
                _check_values(rule, self._named(kind, name), f"{where}[{key!r}]")

    def _code_of(self, candidate: Candidate) -> PluginCode:
        return self._code[candidate.provider, identity(candidate.record)]

    def _file(self, record: Record, code: PluginCode) -> None:
        """Add the candidate of a record that can be chosen."""
        match record:
            case OpEntry(name=subject):
                kind: Kind = "kernel"
            case Kernel(op=subject):
                kind = "kernel"
            case LayerEntry(layer_id=subject):
                kind = "layer"
            case SchemeEntry(method=subject):
                kind = "scheme"
            case CheckpointEntry(suffix=subject):
                kind = "checkpoint"
            case AttentionEntry():
                kind, subject = "attention", ""
            case PlatformEntry():
                kind, subject = "platform", ""
            case _:
                return
        is_op = isinstance(record, OpEntry)
        candidate = Candidate(
            "reference" if is_op else record.name,
            code.plugin.distribution,
            code.plugin.version,
            getattr(record, "score", 0.0),
            record,
            acceptance_of(record, code),
        )
        self._candidates[kind].setdefault(subject, []).append(candidate)

    def _drivers_of(self, plugin: Plugin) -> str:
        """Return what tells apart the drivers that a plugin's code may meet."""
        platforms = {getattr(record, "platform", "") for record in plugin.records}
        platforms |= {r.name for r in plugin.records if isinstance(r, PlatformEntry)}
        return " ".join(filter(None, map(self.driver, sorted(platforms))))

    def _instead(self, method: str) -> str:
        """Return the quantization methods that are recommended instead of one nobody reads."""
        records = (record for _, record in self.records(SchemeEntry))
        found = {repr(record.method) for record in records if method in record.instead_of}
        return " or ".join(sorted(found))

    def _named(self, kind: Kind, subject: str) -> list[Candidate]:
        everyone = self._candidates[kind]
        if kind == "attention" or subject == "*":
            return [candidate for some in everyone.values() for candidate in some]
        return everyone.get(subject, [])

    def _hint(self, hint: str = "") -> str:
        """Add the plugins that failed, one of which may be what is missing."""
        failed = [f"  {f.name} ({f.distribution}): {f.error.reason}" for f in self.plugins.failed]
        lines = [hint] if hint else []
        if failed:
            lines += ["Plugins that failed, one of which may be what is missing:", *failed]
        return "\n".join(lines)


def current_registry(config: Config | None = None) -> Registry:
    """Return the registry for the configuration in force; asking again is cheap.

    Raises:
        PluginError: the configuration is strict and a plugin is quarantined.
        PluginConflictError: a plugin that was added in code has the name of an installed one.
        UnknownNameError: the allow list names a distribution that is not installed.
        LockError: the configuration is locked, and other plugins are installed.
    """
    config = effective_config(config)
    registry = _registry(tuple(getattr(config, name) for name in _FIELDS), registrations())
    if config.strict and registry.plugins.failed:
        raise registry.plugins.failed[0].error
    return registry


def forget_discovery() -> None:
    """Discover and examine all plugins anew where they are used next."""
    forget_verdicts()
    _discovered.forget()
    forget_registries()


@per_registry
def _registry(fields: tuple[Any, ...], added: tuple[Registration, ...]) -> Registry:
    plugins = _discovered(fields)
    if added:
        plugins = plugins.with_added(registration.entry for registration in added)
    return Registry(plugins, _examining(fields))


@cached
def _discovered(fields: tuple[Any, ...]) -> Plugins:
    return discover(_examining(fields))


def _examining(fields: tuple[Any, ...]) -> Config:
    return Config(**dict(zip(_FIELDS, fields, strict=True)))


def _check_values(rule: Rule, candidates: Iterable[Candidate], where: str) -> None:
    names = {name for c in candidates for name in (c.name, c.qualified_name)}
    for value in (*rule.prefer, *sorted(rule.forbid)):
        if value not in names and not set("*?[") & set(value):
            raise UnknownNameError("candidate", value, names, where=where)


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the readable ones of ``files``; empty if there is none."""
    contents = []
    for file in sorted(files):
        try:
            contents.append(file.read_bytes())
        except OSError:
            continue
    return hashlib.sha256(b"\0".join(contents)).hexdigest() if contents else ""
