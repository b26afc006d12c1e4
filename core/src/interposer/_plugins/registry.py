"""The records of all usable plugins, as candidates for the selection."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from interposer._config.config import Config, effective_config
from interposer._config.once import memoized
from interposer._config.rules import Rule
from interposer._contract.choice import Candidate
from interposer._contract.errors import FOREIGN_ERRORS, PluginError, UnknownNameError, described
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
    load_target,
)
from interposer._contract.request import AttentionType, Kind
from interposer._contract.verdict import Verdict
from interposer._plugins.acceptance import (
    Access,
    Judge,
    accept,
    judge_attention,
    judge_declared,
    judge_platform,
)
from interposer._plugins.discovery import discover, tell_probed
from interposer._plugins.plugins import Blame, Plugin, Plugins
from interposer._plugins.registration import (
    Registration,
    forget_registries,
    per_registry,
    registrations,
)
from interposer._sandbox.examiner import examine, forget_verdicts
from interposer._sandbox.task import Task
from interposer._sandbox.tasks import perform
from interposer._validation.distribution import Distribution

P = ParamSpec("P")
R = TypeVar("R", bound=Record)
T = TypeVar("T")

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
    """

    def __init__(self, plugins: Plugins, config: Config | None = None) -> None:
        self.plugins = plugins
        self.config = config or Config()
        self._own_blame = Blame()
        self._hanging: dict[tuple[str, str], Verdict] = {}
        self._candidates: dict[Kind, dict[str, list[Candidate]]] = {
            kind: {} for kind in get_args(Kind)
        }
        self._owners: dict[tuple[str, tuple[str, str, str]], Plugin] = {}
        for plugin in plugins.loaded:
            access = _Access(self, plugin)
            for record in plugin.records:
                self._owners[plugin.distribution, identity(record)] = plugin
                filed = _filed(record, access)
                if filed is not None:
                    kind, subject, name, score, judge = filed
                    candidate = Candidate(
                        name, plugin.distribution, plugin.version, score, record, judge
                    )
                    self._candidates[kind].setdefault(subject, []).append(candidate)
        self.ops: dict[str, OpEntry] = {r.name: r for _, r in self.records(OpEntry)}
        self._drivers: dict[str, str] = {}
        self._loaded: dict[tuple[str, str], Any] = {}

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
        """Return what ``target``, an import string of the candidate's record, names.

        Raises: PluginError: it cannot be imported, or must not be.
        """
        return self._load(self.owner(candidate), target)

    def examine(self, candidate: Candidate, task: Task) -> Verdict:
        """Say what an examination of a part of ``candidate`` found, remembered where it can be."""
        owner = self.owner(candidate)
        if owner.source.installed is None:
            return perform(task).verdict
        return self._examine(owner, owner.source.installed, task)

    def blame(self, candidate: Candidate) -> Blame:
        """Return where is noted what was found of a candidate's kernels while they were used."""
        installed = self.owner(candidate).source.installed
        return self._own_blame if installed is None else self.plugins.blame

    def owner(self, candidate: Candidate) -> Plugin:
        """Return the plugin that declares ``candidate``."""
        return self._owners[candidate.provider, identity(candidate.record)]

    def driver(self, platform: str) -> str:
        """Return what tells the drivers of a platform apart; empty where it declares none."""
        if platform not in self._drivers:
            files = {
                Path(file)
                for _, record in self.records(PlatformEntry)
                if record.name == platform
                for file in record.driver_files
            }
            self._drivers[platform] = _digest(files)
        return self._drivers[platform]

    def check_rules(self, config: Config) -> None:
        """Raise UnknownNameError for a rule on an op, layer id or type that nobody knows.

        So does a preferred or forbidden name that no candidate has; a glob may match nothing.
        """
        types = get_args(AttentionType)
        fields: tuple[tuple[str, Kind, str, Iterable[str]], ...] = (
            ("kernels", "kernel", "op", self.ops),
            ("layers", "layer", "layer id", self._candidates["layer"]),
            ("attention", "attention", "attention type", types),
            ("quantization", "scheme", "quantization method", self._candidates["scheme"]),
        )
        for field, kind, what, known in fields:
            rules: Mapping[str, Rule] = getattr(config, field)
            for key, rule in rules.items():
                name, where = key.partition("@")[0], f"in Config.{field}"
                if name != "*" and name not in known:
                    raise UnknownNameError(what, name, known, self._hint(), where)
                _check_values(rule, self._named(kind, name), f"{where}[{key!r}]")

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

    def _trial(self, plugin: Plugin, task: Task) -> Verdict:
        """Say whether this process may run what ``task`` runs of a plugin."""
        installed = plugin.source.installed
        if installed is None or installed.standard:
            return Verdict.accept()
        return self._examine(plugin, installed, task)

    def _examine(self, plugin: Plugin, installed: Distribution, task: Task) -> Verdict:
        asked = (plugin.name, str(task.arguments.get("target")))
        if task.name == "predicate" and asked in self._hanging:
            return self._hanging[asked]
        finding = examine(installed, task, self.config, driver=self._driver(plugin))
        tell_probed(self.plugins, plugin.name, task, finding)
        if task.name == "predicate" and "limit_seconds" in finding.facts:
            self._hanging[asked] = finding.verdict  # it is not waited for at every request
        return finding.verdict

    def _driver(self, plugin: Plugin) -> str:
        """Return what tells apart the drivers that a plugin's code may meet."""
        platforms = {getattr(record, "platform", "") for record in plugin.records}
        platforms |= {r.name for r in plugin.records if isinstance(r, PlatformEntry)}
        return " ".join(filter(None, map(self.driver, sorted(platforms))))

    def _load(self, plugin: Plugin, target: str) -> Any:
        known = (plugin.name, target)
        if known not in self._loaded:
            self._loaded[known] = self._load_first(plugin, target)
        return self._loaded[known]

    def _load_first(self, plugin: Plugin, target: str) -> Any:
        source = plugin.source
        verdict = self._trial(plugin, Task("target", {"targets": [target]}))
        cause: BaseException | None = None
        if verdict:
            try:
                return load_target(target)
            except FOREIGN_ERRORS as error:
                verdict, cause = Verdict.refuse(described(error)), error
        raise PluginError(
            plugin.name,
            source.origin,
            f"{target!r} cannot be loaded: {verdict.reason}",
            f"mend or reinstall it, or disable it: INTERPOSER_DISABLE={plugin.name}",
            verdict.traceback,
        ) from cause


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


@memoized
def _discovered(fields: tuple[Any, ...]) -> Plugins:
    return discover(_examining(fields))


def _examining(fields: tuple[Any, ...]) -> Config:
    return Config(**dict(zip(_FIELDS, fields, strict=True)))


class _Access:
    """The way to the code of one plugin, which is examined before it runs in this process."""

    def __init__(self, registry: Registry, plugin: Plugin) -> None:
        self._registry = registry
        self._plugin = plugin

    def load(self, target: str) -> Any:
        return self._registry._load(self._plugin, target)

    def trial(self, task: Task) -> Verdict:
        return self._registry._trial(self._plugin, task)


def _filed(record: Record, access: Access) -> tuple[Kind, str, str, float, Judge] | None:
    """Return kind, subject, candidate name, score and judge of a record that can be chosen."""
    match record:
        case OpEntry():
            return "kernel", record.name, "reference", 0.0, accept
        case Kernel():
            return "kernel", record.op, record.name, record.score, judge_declared(record, access)
        case LayerEntry():
            judge = judge_declared(record, access)
            return "layer", record.layer_id, record.name, record.score, judge
        case AttentionEntry():
            return "attention", "", record.name, record.score, judge_attention(record, access)
        case SchemeEntry():
            return "scheme", record.method, record.name, record.score, accept
        case CheckpointEntry():
            return "checkpoint", record.suffix, record.name, record.score, accept
        case PlatformEntry():
            return "platform", "", record.name, record.score, judge_platform(record, access)
        case _:
            return None


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
