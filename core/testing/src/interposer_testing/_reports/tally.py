"""The tally: counts, reasons and faults of each candidate, from the outcomes of trials."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from interposer_testing._reports.facts import STATIC, Examined, Finding, Tally
from interposer_testing._trials.outcome import Outcome, Scope

# Version of a plugin that a script registered. The command line cannot find such a plugin.
_IN_CODE = "in code"
# A wrong kernel often fails in most cases, so only the first faults are kept.
_MAX_FAILED_TRIALS = 3
_MAX_FAULTS = 4


def examined(outcomes: Iterable[Outcome], scope: Scope, platform: str = "") -> list[Examined]:
    """Count outcomes per candidate, in the order of each candidate's first outcome.

    Args:
        platform: the requested platform, for the commands that reproduce faults.
    """
    candidates = dict[tuple[str, str, str, str], _Candidate]()
    for outcome in outcomes:
        candidate = candidates.setdefault(outcome.candidate, _Candidate(outcome))
        candidate.add(outcome, _command(scope, outcome, platform))
    return [candidate.examined() for candidate in candidates.values()]


@dataclass(slots=True)
class _Count:
    """Mutable counts of one aspect, converted to a ``Tally`` at the end."""

    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    not_run: dict[str, int] = field(default_factory=dict)
    cases: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def add(self, outcome: Outcome, command: str) -> None:
        if outcome.state in ("refused", "not run"):
            reasons = self.refused if outcome.state == "refused" else self.not_run
            reasons[outcome.reason] = reasons.get(outcome.reason, 0) + 1
            return
        # The same case runs once per dtype, so count distinct labels.
        self.cases.add(outcome.case)
        self.seconds += outcome.seconds
        if outcome.state == "passed":
            self.passed += 1
            return
        self.failed += 1
        if self.failed <= _MAX_FAILED_TRIALS:
            self.findings += [
                Finding(
                    fault.check,
                    fault.where,
                    fault.reason,
                    outcome.dtype,
                    outcome.case,
                    command,
                    fault.traceback,
                    fault.cause,
                )
                for fault in outcome.faults[:_MAX_FAULTS]
            ]

    def tally(self, aspect: str) -> Tally:
        return Tally(
            aspect,
            self.passed,
            self.failed,
            self.refused,
            self.not_run,
            len(self.cases),
            self.seconds,
            tuple(self.findings),
        )


class _Candidate:
    """Mutable results of one candidate, converted to an ``Examined`` at the end."""

    def __init__(self, first: Outcome) -> None:
        self._first = first
        self._dtypes = dict[str, None]()
        self._counts = dict[str, _Count]()

    def add(self, outcome: Outcome, command: str) -> None:
        self._counts.setdefault(outcome.aspect, _Count()).add(outcome, command)
        if outcome.dtype and outcome.state in ("passed", "failed"):
            self._dtypes[outcome.dtype] = None

    def examined(self) -> Examined:
        first = self._first
        return Examined(
            first.kind,
            first.subject,
            first.name,
            first.provider,
            first.version,
            first.platform,
            tuple(self._dtypes),
            tuple(count.tally(aspect) for aspect, count in self._counts.items()),
        )


def _command(scope: Scope, outcome: Outcome, platform: str) -> str:
    """Return the command line, or the Python code, that runs the case of ``outcome`` again."""
    # --op selects kernels only, so it would exclude checks of records.
    op = outcome.subject if outcome.kind == "kernel" and outcome.aspect not in STATIC else ""
    if outcome.version == _IN_CODE:
        limits = f"op={op!r}, " if op else ""
        limits += f"case={outcome.case!r}, seed={scope.seed}, quick={scope.quick}"
        limits += f", host={scope.host!r}" if scope.host else ""
        return f"interposer_testing.verify({scope.distribution!r}, {limits})"
    words = ["interposer", "verify", scope.distribution]
    words += ["--op", op] if op else []
    words += ["--case", outcome.case, "--seed", str(scope.seed)]
    words += ["--quick"] if scope.quick else []
    words += ["--host", scope.host] if scope.host else []
    words += ["--platform", platform] if platform else []
    return shlex.join(words)
