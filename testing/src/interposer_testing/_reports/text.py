"""The findings of a verification as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from interposer_testing._reports.causes import Cause, is_told, shared_causes
from interposer_testing._reports.facts import Examined, Finding, Tally
from interposer_testing._reports.legend import CHECKS, STATES


def counted(candidates: Sequence[Examined]) -> str:
    """Return the number of candidates in each state, and of declarations that hold."""
    sound = [c for c in candidates if c.is_declaration and c.state == "correct"]
    others = [c.state for c in candidates if c not in sound]
    counts = [f"{others.count(state)} {state}" for state in STATES if state in others]
    counts += [f"{_number(len(sound), 'declaration')} sound"] if sound else []
    return ", ".join(counts)


def wrong_blocks(candidates: Iterable[Examined]) -> list[list[str]]:
    """Return a block of lines for every aspect in which a candidate is wrong.

    An import that fails has one for everything that is wrong because of it.
    """
    candidates = list(candidates)
    causes = shared_causes(candidates)
    blocks = [_cause_lines(cause) for cause in causes]
    for candidate in candidates:
        seen = set[str]()  # one traceback of each kind is enough
        failed = [t for t in candidate.tallies if t.failed and not is_told(t, causes)]
        blocks += [wrong_lines(candidate, tally, seen) for tally in failed]
    return blocks


def candidate_lines(candidate: Examined) -> list[str]:
    """Return the state of a candidate, the counts of each aspect, and reasons."""
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
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if not tally.ran:
        return told
    return f"{told}; {_number(tally.cases, 'case')}, {tally.seconds:.1f} s"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def reason_lines(candidate: Examined) -> Iterator[str]:
    """Yield why trials were refused or not run."""
    for state in ("refused", "not run"):
        for reason, count in candidate.reasons(state).items():
            times = f", {count} times" if count > 1 else ""
            yield f"{state}: {reason}{times}"


def wrong_lines(candidate: Examined, tally: Tally, seen: set[str] | None = None) -> list[str]:
    """Return the faults that a tally keeps, and the command that repeats them.

    Args:
        seen: reasons whose traceback was shown, and need not be again; it is added to.
    """
    seen = set() if seen is None else seen
    cases = dict.fromkeys((f.dtype, f.case, f.command) for f in tally.findings)
    more = f"; the first {len(cases)}:" if tally.failed > len(cases) else ":"
    trials = f"{tally.failed} of {_number(tally.ran, 'trial')} failed"
    lines = [f"WRONG {candidate.title}, {tally.aspect}: {trials}{more}"]
    for dtype, case, command in cases:
        lines.append("  " + ", ".join(filter(None, (dtype, f"case {case!r}"))))
        for finding in tally.findings:
            if (finding.dtype, finding.case) == (dtype, case):
                lines += [f"    {line}" for line in _finding_lines(finding, seen)]
        lines.append(f"    Try again: {command}")
    return lines


def _cause_lines(cause: Cause) -> list[str]:
    lines = [f"WRONG {cause.title}"]
    lines += [f"  {line}" for line in cause.hit_lines]
    lines += [f"    {line}" for line in cause.first.traceback.splitlines()]
    return [*lines, f"    Try again: {cause.first.command}"]


def _finding_lines(finding: Finding, seen: set[str]) -> Iterator[str]:
    yield f"{finding.where}: {finding.reason}"
    if finding.check in CHECKS:
        yield f"  ({finding.check}: {CHECKS[finding.check]})"
    if finding.reason not in seen:
        yield from (f"    {line}" for line in finding.traceback.splitlines())
    seen.add(finding.reason)
