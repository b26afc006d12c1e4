"""Running plugin code: sandbox trials, loading of objects, and predicates on requests."""

from __future__ import annotations

import re
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
"""The records that declare a platform and requirements."""
Runs = Callable[[str], Collection[str]]
"""Returns the platforms whose records run on the named one; an empty name means any."""
# The reason that ``judge_requirements`` gives for a candidate of another platform.
_OTHER_PLATFORM = "runs on {}, the request is for {}"
_IS_OTHER_PLATFORM = re.compile(_OTHER_PLATFORM.format(r"(\S+)", r"\S+"))


class Code:
    """Trusted code, which is loaded without a trial in the sandbox."""

    def load(self, target: str) -> Any:
        """Load the object of an import string."""
        return load_target(target)

    def trial(self, _task: Task) -> Verdict:
        """Return the verdict whether this process may run the code of ``task``."""
        return Verdict.accept()


class PluginCode(Code):
    """The code of one plugin: tried in the sandbox, then loaded once.

    Args:
        driver: identifies the drivers that the code may use.
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
        """Load the object of an import string.

        Raises: PluginError: the object cannot be imported, or must not be.
        """
        if target in self._loaded:
            return self._loaded[target]
        cause: BaseException | None = None
        # Every other task loads its target first, so a tried target needs no trial of its own.
        is_tried = target in self._tried
        verdict = (
            Verdict.accept() if is_tried else self.trial(Task("target", {"targets": [target]}))
        )
        if verdict:
            try:
                return self._loaded.setdefault(target, load_target(target))
            except foreign_errors() as error:
                verdict, cause = Verdict.refuse(described(error)), error
        raise PluginError(
            self.plugin.name,
            self.plugin.source.origin,
            f"{target!r} cannot be loaded: {verdict.reason}",
            f"fix or reinstall it, or disable it: {self.plugin.source.disabling}",
            verdict.traceback,
        ) from cause

    def trial(self, task: Task) -> Verdict:
        """Return the verdict whether this process may run the code of ``task``."""
        source = self.plugin.source
        if source.installed is None:
            return Verdict.accept()
        if source.standard and (self._config.isolation == "off" or self._is_sound(task)):
            return Verdict.accept()
        return self.examine(task)

    def _is_sound(self, task: Task) -> bool:
        """Tell whether a module of the SDK can be loaded; one examination covers the whole package.

        The SDK's modules are many and small. If the joint examination fails, each module is
        examined separately.
        """
        (target,) = task.arguments.get("targets") or [task.arguments["target"]]
        package = _package(target)
        if package not in self._sound:
            targets = {r.target for r in self.plugin.records if hasattr(r, "target")} | {target}
            package_targets = sorted(
                candidate for candidate in targets if _package(candidate) == package
            )
            if self.examine(Task("target", {"targets": package_targets})):
                self._sound.add(package)
        return package in self._sound

    def examine(self, task: Task) -> Verdict:
        """Examine the code of a task, or return the remembered verdict."""
        installed = self.plugin.source.installed
        # A plugin that was registered in code may not be importable in another process.
        if installed is None:
            return _verdict(perform(task))
        target = str(task.arguments.get("target"))
        if task.name == "predicate" and target in self._hanging:
            return self._hanging[target]
        finding = examine(installed, task, self._config, driver=self._driver)
        self._plugins.observe_examination(self.plugin.name, task, finding)
        if self.plugin.source.standard and "unavailable" in finding.facts:
            return Verdict.accept()  # parts of the SDK run even if no process can examine them
        if task.name == "predicate" and "limit_seconds" in finding.facts:
            self._hanging[target] = _verdict(finding)  # do not wait again at every request
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
    """Return the function that judges requests for a record; without ``code``, all code is trusted.

    An exception in the plugin's code becomes a refusal with the traceback.

    Args:
        runs: see ``Registry.runs``; by default a platform runs records for itself and for any
            platform.
    """
    code = code or Code()
    match record:
        case Kernel() | LayerEntry() | AttentionEntry() | CommunicatorEntry():
            return _Acceptance(record, code, runs)
        case PlatformEntry():
            return partial(_guarded, partial(_probe, record.target, code))
    return lambda _: Verdict.accept()


def judge_requirements(record: Judged, request: Request, runs: Runs) -> Verdict:
    """Judge ``request`` by the platform and the requirements of the record.

    A platform that runs the record's platform is accepted too, and the reason then says so.
    """
    record_platform, request_platform = record.platform, request.platform
    if record_platform not in runs(request_platform):
        return Verdict.refuse(_OTHER_PLATFORM.format(record_platform, request_platform))
    verdict = record.requires.judge(request)
    if verdict and record_platform not in ("", request_platform):
        return Verdict.accept(
            f"made for {record_platform}, whose kernels {request_platform} can run"
        )
    return verdict


def platform_of_refusal(reason: str) -> str:
    """Return the platform that a refusal names as the only fitting one; "" for other refusals."""
    match = _IS_OTHER_PLATFORM.fullmatch(reason)
    return match[1] if match else ""


class _Acceptance:
    """Judges a request by platform, requirements and the record's own code, in that order.

    The last verdict is kept, because a request is judged both for measurements and for the choice.
    """

    def __init__(self, record: Judged, code: Code, runs: Runs) -> None:
        self._record = record
        self._code = code
        self._runs = runs
        self._last: tuple[Request, Verdict] | None = None

    def __call__(self, request: Request) -> Verdict:
        last = self._last
        # Compared by identity, because a predicate may read the prefix, which equality ignores.
        if last is None or last[0] is not request:
            last = self._last = (request, _guarded(self._judge, request))
        return last[1]

    def _judge(self, request: Request) -> Verdict:
        record = self._record
        target, member = record.predicate, ""
        # Without a predicate, the class itself judges, which imports its module.
        if not target and isinstance(record, AttentionEntry):
            target, member = record.target, "accepts"
        verdict = judge_requirements(record, request, self._runs)
        platform_reason = verdict.reason
        if verdict and target:
            arguments = {"target": target, "member": member, "request": request.to_json()}
            verdict = self._code.trial(Task("predicate", arguments))
            if verdict:
                target_object = self._code.load(target)
                predicate = getattr(target_object, member) if member else target_object
                is_plain = request.detail is None
                verdict = (
                    predicate(request)
                    if is_plain
                    else predicate(request.detail, request.capability)
                )
                if platform_reason and isinstance(verdict, Verdict) and verdict.accepted:
                    verdict = Verdict.accept(
                        "; ".join(filter(None, (platform_reason, verdict.reason)))
                    )
        return verdict


def _probe(target: str, code: Code, _request: Request) -> Verdict:
    verdict = code.trial(Task("platform", {"target": target}))
    if not verdict:
        # A refused trial is a failure, unlike a probe that finds no device. A failure has a
        # traceback, so that it cannot cause a silent fallback to another platform.
        return Verdict.refuse(verdict.reason, verdict.traceback or verdict.reason)
    verdict_of_probe: Verdict = code.load(target).probe()
    return verdict_of_probe


def _guarded(accepts: Accepts, request: Request) -> Verdict:
    """Turn an exception of plugin code into a refusal that keeps the traceback."""
    try:
        verdict = accepts(request)
        if type(verdict) is not Verdict:  # a subclass could override anything
            raise TypeError(f"{verdict!r:.100} is not a Verdict")
    except PluginError as error:
        return Verdict.refuse(error.reason, error.trace or traced(error))
    except foreign_errors() as error:
        return Verdict.refuse(f"its own code failed: {described(error)}", traced(error))
    return verdict
