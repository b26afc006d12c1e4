"""The code of plugins: tried and loaded, and asked whether candidates accept requests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from interposer._config.config import Config
from interposer._contract.errors import PluginError, described, foreign_errors, traced
from interposer._contract.records import (
    AttentionEntry,
    CommunicatorEntry,
    Kernel,
    LayerEntry,
    PlatformEntry,
    Record,
    load_target,
)
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict
from interposer._examination.examiner import examine
from interposer._examination.inspection import perform
from interposer._examination.task import Task
from interposer._plugins.plugins import Plugin, Plugins
from interposer_sandbox import Finding

Accepts = Callable[[Request], Verdict]
Judged = Kernel | LayerEntry | AttentionEntry | CommunicatorEntry
"""The records that say for which platform and requests they are."""
Runs = Callable[[str], Collection[str]]
"""Returns which platforms a record may be for to run on the named one; empty is for any."""


class Code:
    """Code that is loaded without a trial."""

    def load(self, target: str) -> Any:
        """Return the object of an import string."""
        return load_target(target)

    def trial(self, _task: Task) -> Verdict:
        """Say whether this process may run what a task runs."""
        return Verdict.accept()


class PluginCode(Code):
    """The code of one plugin: tried in the sandbox, then loaded once.

    Args:
        driver: what tells apart the drivers that the code may meet.
    """

    def __init__(self, plugins: Plugins, plugin: Plugin, config: Config, driver: str) -> None:
        self.plugin = plugin
        self._plugins = plugins
        self._config = config
        self._driver = driver
        self._loaded: dict[str, Any] = {}
        self._hanging: dict[str, Verdict] = {}
        self._sound: set[str] = set()
        self._tried: set[object] = set()

    def load(self, target: str) -> Any:
        """Return the object of an import string.

        Raises: PluginError: it cannot be imported, or must not be.
        """
        if target in self._loaded:
            return self._loaded[target]
        cause: BaseException | None = None
        # Who was probed, asked or compared was loaded first.
        tried = target in self._tried
        verdict = Verdict.accept() if tried else self.trial(Task("target", {"targets": [target]}))
        if verdict:
            try:
                return self._loaded.setdefault(target, load_target(target))
            except foreign_errors() as error:
                verdict, cause = Verdict.refuse(described(error)), error
        raise PluginError(
            self.plugin.name,
            self.plugin.source.origin,
            f"{target!r} cannot be loaded: {verdict.reason}",
            f"mend or reinstall it, or disable it: {self.plugin.source.disabling}",
            verdict.traceback,
        ) from cause

    def trial(self, task: Task) -> Verdict:
        """Say whether this process may run what a task runs."""
        source = self.plugin.source
        if source.installed is None:
            return Verdict.accept()
        if source.standard and (self._config.isolation == "off" or self._is_sound(task)):
            return Verdict.accept()
        return self.examine(task)

    def _is_sound(self, task: Task) -> bool:
        """Say whether a part of the SDK can be loaded, all that lies in one package at once.

        Its modules are many and small. What is not sound together is examined one by one.
        """
        (target,) = task.arguments.get("targets") or [task.arguments["target"]]
        package = _package(target)
        if package not in self._sound:
            targets = {r.target for r in self.plugin.records if hasattr(r, "target")} | {target}
            beside = sorted(other for other in targets if _package(other) == package)
            if self.examine(Task("target", {"targets": beside})):
                self._sound.add(package)
        return package in self._sound

    def examine(self, task: Task) -> Verdict:
        """Return what an examination found, now or before."""
        installed = self.plugin.source.installed
        if installed is None:
            return _verdict(perform(task))
        asked = str(task.arguments.get("target"))
        if task.name == "predicate" and asked in self._hanging:
            return self._hanging[asked]
        finding = examine(installed, task, self._config, driver=self._driver)
        self._plugins.tell_probed(self.plugin.name, task, finding)
        if self.plugin.source.standard and "unavailable" in finding.facts:
            return Verdict.accept()  # the SDK works where nothing can be examined
        if task.name == "predicate" and "limit_seconds" in finding.facts:
            self._hanging[asked] = _verdict(finding)  # it is not waited for at every request
        if finding:
            self._tried.add(task.arguments.get("target"))
        return _verdict(finding)


def _verdict(finding: Finding) -> Verdict:
    return Verdict(finding.accepted, finding.reason, finding.traceback)


def _package(target: str) -> str:
    return target.partition(":")[0].rpartition(".")[0]


def _runs_itself(platform: str) -> Collection[str]:
    return "", platform


def acceptance_of(record: Record, code: Code | None = None, runs: Runs = _runs_itself) -> Accepts:
    """Return how a record accepts requests; without ``code``, its plugin's is trusted.

    Code that raises refuses, with its traceback.

    Args:
        runs: see ``Registry.runs``; by default a platform runs what is for it or for any.
    """
    code = code or Code()
    match record:
        case Kernel() | LayerEntry() | AttentionEntry() | CommunicatorEntry():
            return _Acceptance(record, code, runs)
        case PlatformEntry():
            return partial(_guarded, partial(_probe, record.target, code))
    return lambda _: Verdict.accept()


def judge_requirements(record: Judged, request: Request, runs: Runs) -> Verdict:
    """Say whether ``request`` is for the record's platform and meets its requirements.

    A platform that runs what the record is for will do. The reason of an acceptance says so.
    """
    own, asked = record.platform, request.platform
    if own not in runs(asked):
        return Verdict.refuse(f"runs on {own}, the request is for {asked}")
    verdict = record.requires.judge(request)
    if verdict and own not in ("", asked):
        return Verdict.accept(f"for {own}, whose kernels {asked} runs by its own statement")
    return verdict


class _Acceptance:
    """Acceptance by platform, requirements and the record's own code, in that order.

    The last answer is kept: a request is judged for its measurements and for the choice.
    """

    def __init__(self, record: Judged, code: Code, runs: Runs) -> None:
        self._record = record
        self._code = code
        self._runs = runs
        self._last: tuple[Request, Verdict] | None = None

    def __call__(self, request: Request) -> Verdict:
        last = self._last
        if last is None or last[0] is not request:
            last = self._last = (request, _guarded(self._judge, request))
        return last[1]

    def _judge(self, request: Request) -> Verdict:
        record = self._record
        target, member = record.predicate, ""
        if not target and isinstance(record, AttentionEntry):
            target, member = record.target, "accepts"
        verdict = judge_requirements(record, request, self._runs)
        lent = verdict.reason
        if verdict and target:
            arguments = {"target": target, "member": member, "request": request.to_json()}
            verdict = self._code.trial(Task("predicate", arguments))
            if verdict:
                found = self._code.load(target)
                asked = getattr(found, member) if member else found
                plain = request.detail is None
                verdict = asked(request) if plain else asked(request.detail, request.capability)
                if lent and isinstance(verdict, Verdict) and verdict.accepted:
                    verdict = Verdict.accept("; ".join(filter(None, (lent, verdict.reason))))
        return verdict


def _probe(target: str, code: Code, _request: Request) -> Verdict:
    verdict = code.trial(Task("platform", {"target": target}))
    if not verdict:
        # A probe that never came back failed, which is not the same as to find nothing.
        return Verdict.refuse(verdict.reason, verdict.traceback or verdict.reason)
    found: Verdict = code.load(target).probe()
    return found


def _guarded(accepts: Accepts, request: Request) -> Verdict:
    """Turn an exception of plugin code into a refusal that keeps the traceback."""
    try:
        verdict = accepts(request)
        if type(verdict) is not Verdict:  # what a subclass says of itself may be anything
            raise TypeError(f"{verdict!r:.100} is not a Verdict")
    except PluginError as error:
        return Verdict.refuse(error.reason, error.trace or traced(error))
    except foreign_errors() as error:
        return Verdict.refuse(f"its own code failed: {described(error)}", traced(error))
    return verdict
