"""How the candidates of each kind judge a request; plugin code that raises becomes a refusal.

``Load`` returns what an import string names; the registry's examines foreign code first.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

from interposer.errors import FOREIGN_ERRORS, PluginError
from interposer.records import AttentionEntry, Kernel, LayerEntry, PlatformEntry
from interposer.request import Request
from interposer.verdict import Verdict

__all__ = [
    "Judge",
    "Load",
    "accept",
    "judge_attention",
    "judge_declared",
    "judge_platform",
    "judge_requirements",
]

Judge = Callable[[Request], Verdict]
Load = Callable[[str], Any]


def accept(_request: Request) -> Verdict:
    """Accept everything, as a reference does."""
    return Verdict.accept()


def judge_declared(record: Kernel | LayerEntry, load: Load) -> Judge:
    """Return a judge of platform, requirements and predicate, in that order."""

    @_guarded
    def judge(request: Request) -> Verdict:
        verdict = judge_requirements(record, request)
        if verdict and record.predicate:
            verdict = load(record.predicate)(request)
        return verdict

    return judge


def judge_attention(record: AttentionEntry, load: Load) -> Judge:
    """Return a judge of platform and requirements that then asks the backend itself."""

    @_guarded
    def judge(request: Request) -> Verdict:
        verdict = judge_requirements(record, request)
        if verdict:
            accepts = load(record.predicate) if record.predicate else load(record.target).accepts
            verdict = accepts(request.detail, request.capability)
        return verdict

    return judge


def judge_platform(record: PlatformEntry, load: Load) -> Judge:
    """Return a judge that probes this machine."""

    @_guarded
    def judge(_request: Request) -> Verdict:
        verdict: Verdict = load(record.target).probe()
        return verdict

    return judge


def judge_requirements(record: Kernel | LayerEntry | AttentionEntry, request: Request) -> Verdict:
    """Say whether ``request`` is for the record's platform and meets what it requires."""
    if record.platform and record.platform != request.platform:
        return Verdict.refuse(f"runs on {record.platform}, the request is for {request.platform}")
    return record.requires.judge(request)


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
            return Verdict.refuse(f"its own code failed: {error!r}", traceback.format_exc())
        return verdict

    return guarded
