"""The results of a verification as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from interposer_testing._reports.causes import Cause, is_explained, shared_causes
from interposer_testing._reports.facts import Examined, Finding, Tally
from interposer_testing._reports.legend import CHECKS, STATES


def state_counts(candidates: Sequence[Examined]) -> str:
    """Return the number of candidates per state, and the number of correct declarations."""
    sound = [c for c in candidates if c.is_declaration and c.state == "correct"]
    states = [c.state for c in candidates if c not in sound]
    counts = [f"{states.count(state)} {state}" for state in STATES if state in states]
    counts += [f"{_number(len(sound), 'declaration')} sound"] if sound else []
    return ", ".join(counts)


def wrong_blocks(candidates: Iterable[Examined]) -> list[list[str]]:
    """Return one block of lines per wrong aspect of a candidate.

    All faults that a failed import causes share one block.
    """
    candidates = list(candidates)
    causes = shared_causes(candidates)
    blocks = [_cause_lines(cause) for cause in causes]
    for candidate in candidates:
        shown_reasons = set[str]()  # show the traceback of each reason only once
        failed = [t for t in candidate.tallies if t.failed and not is_explained(t, causes)]
        blocks += [wrong_lines(candidate, tally, shown_reasons) for tally in failed]
    return blocks


def candidate_lines(candidate: Examined) -> list[str]:
    """Return the lines of a candidate: state, counts per aspect, and reasons."""
    origin = f"{candidate.provider} {candidate.version}"
    dtypes = f" in {', '.join(candidate.dtypes)}" if candidate.dtypes else ""
    lines = [f"{candidate.title} ({origin}): {candidate.state}{dtypes}"]
    lines += [f"  {tally.aspect}: {_counts(tally)}" for tally in candidate.tallies]
    return [*lines, *(f"  {reason}" for reason in reason_lines(candidate))]


def _counts(tally: Tally) -> str:
    counts = {
        "passed": tally.passed,
        "failed": tally.failed,
        "refused": sum(tally.refused.values()),
        "not run": sum(tally.not_run.values()),
    }
    text = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    if not tally.ran:
        return text
    return f"{text}; {_number(tally.cases, 'case')}, {tally.seconds:.1f} s"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def reason_lines(candidate: Examined) -> Iterator[str]:
    """Yield the reasons why trials were refused or not run, with counts."""
    for state in ("refused", "not run"):
        for reason, count in candidate.reasons(state).items():
            times = f", {count} times" if count > 1 else ""
            yield f"{state}: {reason}{times}"


def wrong_lines(
    candidate: Examined, tally: Tally, shown_reasons: set[str] | None = None
) -> list[str]:
    """Return the faults in a tally, each with the command that reproduces it.

    Args:
        shown_reasons: reasons whose traceback was shown already; extended by this call.
    """
    shown_reasons = set() if shown_reasons is None else shown_reasons
    # A dict instead of a set keeps the order of the findings.
    cases = dict.fromkeys((f.dtype, f.case, f.command) for f in tally.findings)
    # A tally stores the findings of the first failed cases only.
    more = f"; the first {len(cases)}:" if tally.failed > len(cases) else ":"
    trials = f"{tally.failed} of {_number(tally.ran, 'trial')} failed"
    lines = [f"WRONG {candidate.title}, {tally.aspect}: {trials}{more}"]
    for dtype, case, command in cases:
        lines.append("  " + ", ".join(filter(None, (dtype, f"case {case!r}"))))
        for finding in tally.findings:
            if (finding.dtype, finding.case) == (dtype, case):
                lines += [f"    {line}" for line in _finding_lines(finding, shown_reasons)]
        lines.append(f"    Try again: {command}")
    return lines


def _cause_lines(cause: Cause) -> list[str]:
    lines = [f"WRONG {cause.title}"]
    lines += [f"  {line}" for line in cause.hit_lines]
    lines += [f"    {line}" for line in cause.first.traceback.splitlines()]
    return [*lines, f"    Try again: {cause.first.command}"]


def _finding_lines(finding: Finding, shown_reasons: set[str]) -> Iterator[str]:
    yield f"{finding.where}: {finding.reason}"
    if finding.check in CHECKS:
        yield f"  ({finding.check}: {CHECKS[finding.check]})"
    if finding.reason not in shown_reasons:
        yield from (f"    {line}" for line in finding.traceback.splitlines())
    shown_reasons.add(finding.reason)
