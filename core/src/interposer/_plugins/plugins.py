"""The result of a discovery: plugins in use, failed and skipped, and observer hooks."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import pluggy

from interposer import hookspecs
from interposer._contract.copying import copied
from interposer._contract.errors import (
    InterposerError,
    PluginConflictError,
    PluginError,
    RecordError,
    described,
    foreign_errors,
    install_command,
    traced,
    warn,
)
from interposer._contract.records import OpEntry, Record
from interposer._contract.verdict import Refusal, Verdict
from interposer._examination.task import Task
from interposer._validation.compatibility import declared_records, hook_names, register_hooks
from interposer._validation.distribution import STANDARD, Distribution
from interposer._validation.records import check_facts, is_name
from interposer_sandbox import Finding


class PluginWarning(UserWarning):
    """A plugin cannot be used; the text names the plugin and the reason."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a plugin comes from: an entry point of a distribution, or a call of ``register``.

    Attributes:
        name: of the entry point, or the name given to ``register``.
        installed: facts of the distribution; None for a plugin that was registered in code.
        value: the object that the entry point names, as in ``"acme.plugin"``.
    """

    name: str
    distribution: str
    version: str
    installed: Distribution | None = None
    value: str = ""

    @property
    def origin(self) -> str:
        """Distribution and version, for display."""
        return f"{self.distribution} {self.version}"

    @property
    def disabling(self) -> str:
        """The shell assignment of ``INTERPOSER_DISABLE`` that disables the plugin."""
        # An invalid plugin name must not reach a shell; a distribution's name is always valid.
        name = self.name if is_name(self.name) else self.distribution
        return f"INTERPOSER_DISABLE={shlex.quote(name)}"

    @property
    def standard(self) -> bool:
        """Whether the plugin is a part of the SDK."""
        return self.installed is not None and self.installed.standard


@dataclass(frozen=True, slots=True)
class Plugin:
    """A usable plugin with records and the names of other hooks."""

    source: Source
    records: tuple[Record, ...]
    hooks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the plugin's entry point, or the name given to ``register``."""
        return self.source.name

    @property
    def distribution(self) -> str:
        """The name of the distribution that provides the plugin."""
        return self.source.distribution

    @property
    def version(self) -> str:
        """The distribution's version, or ``"in code"``."""
        return self.source.version

    def summary(self) -> dict[str, int]:
        """Return the number of records of each kind."""
        return dict(Counter(type(record).__name__ for record in self.records))


@dataclass(frozen=True, slots=True)
class Failure:
    """A quarantined plugin: the error, and the traceback if the plugin's code raised.

    ``platforms`` are names and scores of the platforms that the plugin is known to declare.
    """

    name: str
    distribution: str
    version: str
    error: PluginError
    traceback: str = ""
    platforms: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """A plugin that the policy excludes, and the deciding rule."""

    name: str
    distribution: str
    reason: str


@dataclass(frozen=True, slots=True)
class Blame:
    """Kernels of a plugin that failed or computed wrong results after discovery.

    Attributes:
        failures: reasons by qualified name, for kernels that failed at run time and are no longer
            chosen.
        departures: refusals by qualified name and dtype, for kernels that differ from the
            reference.
    """

    failures: dict[str, str] = field(default_factory=dict)
    departures: dict[tuple[str, str], Verdict] = field(default_factory=dict)


class Plugins:
    """All plugins of one discovery and all registered in code, including observers.

    Attributes:
        blame: failures of installed plugins' kernels, shared with copies of this collection.
    """

    def __init__(self) -> None:
        self.blame = Blame()
        self.loaded: list[Plugin] = []
        self.failed: list[Failure] = []
        self.skipped: list[Skipped] = []
        self._settled = False
        self._manager = pluggy.PluginManager("interposer")
        self._manager.add_hookspecs(hookspecs)
        self._sources: dict[str, Source] = {}  # of those whose hooks are called

    @classmethod
    def of(cls, *plugins: Any) -> Plugins:
        """Collect the given modules or objects as plugins, without installed ones.

        The name of a plugin is the object's ``__name__`` or class name. A plugin that fails is
        quarantined. Targets are not checked; ``interposer.register`` checks strictly.
        """
        collection = cls()
        sources = [(in_code(plugin), plugin) for plugin in plugins]
        claims = Counter(source.name for source, _ in sources)
        # Sorted, so that the result does not depend on the order of the arguments.
        for source, plugin in sorted(sources, key=lambda pair: pair[0].name):
            if claims[source.name] > 1:
                collection.conflict(source, [s for s, _ in sources if s.name == source.name])
            else:
                collection.add(source, plugin)
        collection.settle()
        return collection

    def with_added(self, added: Iterable[tuple[Source, Any, tuple[Record, ...]]]) -> Plugins:
        """Return a copy with the ``added`` plugins, whose records were checked before.

        Raises: PluginConflictError: a name is taken.
        """
        combined = Plugins()
        combined.blame = self.blame
        combined.loaded, combined.failed, combined.skipped = (
            [*self.loaded],
            [*self.failed],
            [*self.skipped],
        )
        combined._settled = True
        combined._sources = dict(self._sources)
        for name, module in self._manager.list_name_plugin():
            combined._manager.register(module, name=name)
        for source, plugin, records in added:
            conflict = combined._conflict(source, records)
            if conflict:
                remedy = "register another: interposer.register(plugin, name=...)"
                raise PluginConflictError(source.name, source.origin, conflict, remedy)
            combined._manager.register(plugin, name=source.name)
            combined._sources[source.name] = source
            combined.loaded.append(Plugin(source, records, hook_names(plugin)))
        return combined

    def _conflict(self, source: Source, records: tuple[Record, ...]) -> str:
        """Describe a name or op of a plugin in code that is already taken, or return ""."""
        names = dict.fromkeys(STANDARD, "the SDK")
        for loaded_source in self._sources.values():
            names |= {
                loaded_source.name: loaded_source.origin,
                loaded_source.distribution: loaded_source.origin,
            }
        if source.name in names:
            return f"the name {source.name!r} is taken by {names[source.name]}"
        ops = {
            record.name: plugin.source.origin
            for plugin in self.loaded
            for record in plugin.records
            if isinstance(record, OpEntry)
        }
        for record in records:
            if isinstance(record, OpEntry) and record.name in ops:
                return f"the op {record.name!r} is defined by {ops[record.name]}"
        return ""

    def add(self, source: Source, plugin: Any) -> None:
        """Add the records of an imported plugin to the collection, or quarantine the plugin."""
        self._sources[source.name] = source
        cause: BaseException | None = None
        records: list[Any] = []
        reason = "; ".join(register_hooks(self._manager, plugin, source.name))
        if reason:
            reason = f"its hooks are not valid: {reason}"
        else:
            try:
                records = declared_records(self._manager, source.name)
            except RecordError as error:
                reason, cause = str(error), error
            except foreign_errors() as error:
                reason, cause = f"interposer_records raised {described(error)}", error
            else:
                reason = self._check(source, records)
        if reason:
            self._disown(source.name, reason, cause)
        else:
            self.loaded.append(Plugin(source, tuple(records), hook_names(plugin)))

    def _check(self, source: Source, records: list[Any]) -> str:
        """Describe faults in records, which may differ from the examined records."""
        neighbours = [p for p in self.loaded if p.distribution == source.distribution]
        declared = [record for plugin in neighbours for record in plugin.records]
        # Identities must be unique within a distribution, not only within a plugin.
        faults = check_facts(records) or check_facts([*declared, *records])
        return f"interposer_records {'; '.join(faults)}" if faults else ""

    def settle(self) -> None:
        """Report earlier failures of plugins to the observers, now that every plugin is loaded."""
        self._settled = True
        for failure in [*self.failed]:
            self._notify_failure(failure)

    def observe(self, hook: str, **facts: Any) -> None:
        """Call every observer; an observer that raises is quarantined and never breaks the caller.

        Observers receive copies, because the originals remain in use. An observer that changes a
        (frozen) copy is quarantined as well.
        """
        # A copy of the list, because a quarantine below unregisters plugins.
        for implementation in list(getattr(self._manager.hook, hook).get_hookimpls()):
            name = implementation.plugin_name
            if not self._manager.has_plugin(name):
                continue  # quarantined since the list was made
            arguments = {k: copied(facts[k]) for k in implementation.argnames}
            try:
                implementation.function(**arguments)
                changed = [k for k, fact in arguments.items() if fact != facts[k]]
            except foreign_errors() as error:
                self._disown(name, f"its observer {hook} raised {described(error)}", error)
                continue
            if changed:
                reason = f"its observer {hook} changes the {changed[0]} that it receives"
                self._disown(name, reason)

    def observe_examination(self, plugin: str, task: Task, finding: Finding) -> None:
        """Notify the observers of an examination, unless the finding was remembered."""
        if finding.span is None:
            return
        self.observe(
            "interposer_finished",
            activity="probe",
            subject=f"{plugin} {task.name}",
            start_ns=finding.span[0],
            end_ns=finding.span[1],
            facts={"accepted": finding.accepted, "reason": finding.reason},
        )

    def first_result(
        self, hook: str, needed: Collection[str] = (), **facts: Any
    ) -> tuple[Any, str]:
        """Return the first answer to ``hook`` that is not None, with the plugin's name.

        Plugins are called in the order of names, parts of the SDK last. An error of interposer's
        own kinds counts as an answer and is passed on. Any other exception quarantines the plugin,
        and the next one is called. A hook that does not take every fact in ``needed`` is skipped,
        because the answer would be to another question.
        """
        # Copied, because another thread may quarantine a plugin meanwhile.
        standard = {name for name, source in [*self._sources.items()] if source.standard}
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        for implementation in sorted(
            implementations, key=lambda hook: (hook.plugin_name in standard, hook.plugin_name)
        ):
            name = implementation.plugin_name
            if not set(needed) <= set(implementation.argnames):
                continue
            try:
                answer = implementation.function(**{k: facts[k] for k in implementation.argnames})
            except InterposerError:
                raise
            except foreign_errors() as error:
                self._disown(name, f"its hook {hook} raised {described(error)}", error)
                continue
            if answer is not None:
                return answer, name
        return None, ""

    def refusals(self) -> list[Refusal]:
        """Return the quarantined plugins as refusals, for errors about missing candidates."""
        return [
            Refusal(f.name, f"{f.distribution} {f.version}", f.error.reason, f.traceback)
            for f in self.failed
        ]

    def omissions(self) -> list[Refusal]:
        """Return one refusal for each plugin that the policy excludes."""
        return [Refusal(s.name, s.distribution, s.reason) for s in self.skipped]

    def remedy(self, distribution: str) -> str:
        """Return why no plugin of a distribution is in use, and how to enable it.

        The text continues a sentence whose subject is the distribution.
        """
        for failure in self.failed:
            if failure.distribution == distribution:
                return f"failed: {failure.error.reason}.\nTry: interposer doctor"
        for skipped in self.skipped:
            if skipped.distribution == distribution:
                return f"is not used: {skipped.reason}.\nTry: allow it in the configuration"
        return f"is not installed.\nTry: {install_command(distribution)}"

    def withdraw(self, plugin: Plugin, reason: str, remedy: str = "") -> None:
        """Quarantine a plugin that is already loaded."""
        self.loaded.remove(plugin)
        self._disown(plugin.name, reason, remedy=remedy)

    def conflict(self, source: Source, rivals: Iterable[Source]) -> None:
        """Quarantine a plugin with a name that is claimed more than once."""
        claims = ", ".join(sorted(rival.origin for rival in rivals))
        reason = f"the name {source.name!r} is claimed by {claims}"
        remedy = f"uninstall one, or disable one: INTERPOSER_DISABLE={source.distribution}"
        self._file(source, PluginConflictError(source.name, source.origin, reason, remedy))

    def quarantine(
        self,
        source: Source,
        reason: str,
        remedy: str = "",
        *,
        cause: BaseException | None = None,
        trace: str = "",
        platforms: tuple[tuple[str, float], ...] = (),
    ) -> None:
        """Record ``source`` as failed, warn, and notify the observers."""
        remedy = remedy or f"fix or uninstall it, or disable it: {source.disabling}"
        if cause is not None:
            trace = traced(cause)
        self._file(
            source, PluginError(source.name, source.origin, reason, remedy), trace, platforms
        )

    def _disown(
        self, name: str, reason: str, cause: BaseException | None = None, remedy: str = ""
    ) -> None:
        """Quarantine a plugin and stop calling its observer hooks; keep its records."""
        source = self._sources.pop(name, None)
        if source is not None:  # otherwise another thread did the same
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            self.quarantine(source, reason, remedy, cause=cause)

    def _file(
        self,
        source: Source,
        error: PluginError,
        trace: str = "",
        platforms: tuple[tuple[str, float], ...] = (),
    ) -> None:
        failure = Failure(source.name, source.distribution, source.version, error, trace, platforms)
        self.failed.append(failure)
        warn(str(error), PluginWarning)
        if self._settled:
            self._notify_failure(failure)

    def _notify_failure(self, failure: Failure) -> None:
        self.observe(
            "interposer_failed",
            plugin=failure.name,
            distribution=failure.distribution,
            reason=failure.error.reason,
        )


def in_code(plugin: Any, name: str = "") -> Source:
    """Return the source of a plugin that is a module or an object of this process."""
    name = name or getattr(plugin, "__name__", type(plugin).__name__)
    return Source(name, name, "in code")
