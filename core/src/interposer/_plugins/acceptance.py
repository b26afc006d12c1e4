"""Whether candidates accept requests; plugin code that raises becomes a refusal."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Protocol

from interposer._contract.errors import FOREIGN_ERRORS, PluginError, described
from interposer._contract.records import (
    AttentionEntry,
    Kernel,
    LayerEntry,
    PlatformEntry,
    Record,
    load_target,
)
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict
from interposer._sandbox.task import Task


class Code(Protocol):
    """The code of one plugin, as far as it is asked."""

    def load(self, target: str) -> Any:
        """Return the object of an import string."""

    def trial(self, task: Task) -> Verdict:
        """Say whether the code that a task runs may be run in this process."""


class TrustedCode:
    """Code that is loaded without a trial."""

    def load(self, target: str) -> Any:
        """Return the object of an import string."""
        return load_target(target)

    def trial(self, _task: Task) -> Verdict:
        """Accept."""
        return Verdict.accept()


def acceptance_of(record: Record, code: Code | None = None) -> Callable[[Request], Verdict]:
    """Return how a record accepts requests; without ``code``, its plugin's is trusted."""
    code = code or TrustedCode()
    match record:
        case Kernel() | LayerEntry():
            return DeclaredAcceptance(record, code)
        case AttentionEntry():
            return AttentionAcceptance(record, code)
        case PlatformEntry():
            return PlatformAcceptance(record, code)
        case _:
            return lambda _: Verdict.accept()


def judge_requirements(record: Kernel | LayerEntry | AttentionEntry, request: Request) -> Verdict:
    """Say whether ``request`` is for the record's platform and meets its requirements."""
    if record.platform and record.platform != request.platform:
        return Verdict.refuse(f"runs on {record.platform}, the request is for {request.platform}")
    return record.requires.judge(request)


class DeclaredAcceptance:
    """Acceptance by platform, requirements and predicate, in that order.

    The last answer is remembered: a request is judged for its measurements and for the choice.
    """

    def __init__(self, record: Kernel | LayerEntry | AttentionEntry, code: Code) -> None:
        self.record = record
        self._code = code
        self._last: tuple[Request, Verdict] | None = None

    def __call__(self, request: Request) -> Verdict:
        """Return the answer; code that raises refuses, with its traceback."""
        known = self._last
        if known is None or known[0] is not request:
            known = self._last = (request, _guarded(self._judge, request))
        return known[1]

    def _judge(self, request: Request) -> Verdict:
        verdict = judge_requirements(self.record, request)
        if verdict and self.record.predicate:
            verdict = self._ask(self.record.predicate, "", request)
        return verdict

    def _ask(self, target: str, member: str, request: Request) -> Verdict:
        """Return what a function, or a member of a class, answers; a trial comes first."""
        arguments = {"target": target, "member": member, "request": request.to_json()}
        verdict = self._code.trial(Task("predicate", arguments))
        if verdict:
            found = self._code.load(target)
            asked = getattr(found, member) if member else found
            given = (request,) if request.detail is None else (request.detail, request.capability)
            verdict = asked(*given)
        return verdict


class AttentionAcceptance(DeclaredAcceptance):
    """Acceptance by platform and requirements, then by the backend's own ``accepts``."""

    def _judge(self, request: Request) -> Verdict:
        verdict = judge_requirements(self.record, request)
        if not verdict:
            return verdict
        if self.record.predicate:
            return self._ask(self.record.predicate, "", request)
        return self._ask(self.record.target, "accepts", request)


class PlatformAcceptance:
    """Acceptance by a probe of this machine."""

    def __init__(self, record: PlatformEntry, code: Code) -> None:
        self._record = record
        self._code = code

    def __call__(self, request: Request) -> Verdict:
        """Return what the probe says; code that raises refuses, with its traceback."""
        return _guarded(self._probe, request)

    def _probe(self, _request: Request) -> Verdict:
        verdict = self._code.trial(Task("platform", {"target": self._record.target}))
        if not verdict:
            # A probe that never came back failed, which is not the same as to find nothing.
            return Verdict.refuse(verdict.reason, verdict.traceback or verdict.reason)
        found: Verdict = self._code.load(self._record.target).probe()
        return found


def _guarded(judge: Callable[[Request], Verdict], request: Request) -> Verdict:
    """Turn an exception of plugin code into a refusal that keeps the traceback."""
    try:
        verdict = judge(request)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"{verdict!r} is not a Verdict")
    except PluginError as error:
        return Verdict.refuse(error.reason, error.trace or traceback.format_exc())
    except FOREIGN_ERRORS as error:
        return Verdict.refuse(f"its own code failed: {described(error)}", traceback.format_exc())
    return verdict
