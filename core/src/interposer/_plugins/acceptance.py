"""How the candidates of each kind judge a request; plugin code that raises becomes a refusal."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from interposer._contract.errors import FOREIGN_ERRORS, PluginError, described
from interposer._contract.records import (
    AttentionEntry,
    Kernel,
    LayerEntry,
    PlatformEntry,
    load_target,
)
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict
from interposer._sandbox.task import Task

Judge = Callable[[Request], Verdict]


class Access(Protocol):
    """The way to a plugin's code."""

    def load(self, target: str) -> Any:
        """Return what an import string names."""

    def trial(self, task: Task) -> Verdict:
        """Say whether the code that a task runs may be run in this process."""


class Direct:
    """The way to code that is trusted."""

    def load(self, target: str) -> Any:
        """Return what an import string names."""
        return load_target(target)

    def trial(self, _task: Task) -> Verdict:
        """Accept."""
        return Verdict.accept()


def accept(_request: Request) -> Verdict:
    """Accept everything, as a reference does."""
    return Verdict.accept()


def judge_declared(record: Kernel | LayerEntry, access: Access) -> Judge:
    """Return a judge of platform, requirements and predicate, in that order."""

    @_once
    @_guarded
    def judge(request: Request) -> Verdict:
        verdict = judge_requirements(record, request)
        if verdict and record.predicate:
            verdict = access.trial(_question(record.predicate, "", request))
            if verdict:
                verdict = access.load(record.predicate)(request)
        return verdict

    return judge


def judge_attention(record: AttentionEntry, access: Access) -> Judge:
    """Return a judge of platform and requirements that then asks the backend itself."""
    target, member = (record.predicate, "") if record.predicate else (record.target, "accepts")

    @_once
    @_guarded
    def judge(request: Request) -> Verdict:
        verdict = judge_requirements(record, request)
        if verdict:
            verdict = access.trial(_question(target, member, request))
            if verdict:
                found = access.load(target)
                asked = getattr(found, member) if member else found
                verdict = asked(request.detail, request.capability)
        return verdict

    return judge


def judge_platform(record: PlatformEntry, access: Access) -> Judge:
    """Return a judge that probes this machine."""

    @_guarded
    def judge(_request: Request) -> Verdict:
        verdict = access.trial(Task("platform", {"target": record.target}))
        if not verdict:
            # A probe that never came back failed, which is not the same as to find nothing.
            return Verdict.refuse(verdict.reason, verdict.traceback or verdict.reason)
        found: Verdict = access.load(record.target).probe()
        return found

    return judge


def judge_requirements(record: Kernel | LayerEntry | AttentionEntry, request: Request) -> Verdict:
    """Say whether ``request`` is for the record's platform and meets what it requires."""
    if record.platform and record.platform != request.platform:
        return Verdict.refuse(f"runs on {record.platform}, the request is for {request.platform}")
    return record.requires.judge(request)


def _question(target: str, member: str, request: Request) -> Task:
    return Task("predicate", {"target": target, "member": member, "request": request.to_json()})


def _guarded(judge: Judge) -> Judge:
    """Turn an exception of plugin code into a refusal that keeps the traceback."""

    @wraps(judge)
    def guarded(request: Request) -> Verdict:
        try:
            verdict = judge(request)
            if not isinstance(verdict, Verdict):
                raise TypeError(f"{verdict!r} is not a Verdict")
        except PluginError as error:
            return Verdict.refuse(error.reason, error.trace or traceback.format_exc())
        except FOREIGN_ERRORS as error:
            return Verdict.refuse(
                f"its own code failed: {described(error)}", traceback.format_exc()
            )
        return verdict

    return guarded


def _once(judge: Judge) -> Judge:
    """Remember the last answer: a request is judged for its measurements and for the choice."""
    last: tuple[Request, Verdict] | None = None

    @wraps(judge)
    def once(request: Request) -> Verdict:
        nonlocal last
        known = last
        if known is None or known[0] is not request:
            known = last = (request, judge(request))
        return known[1]

    return once
