"""How a verification's ``Report`` reads: as plain text, and as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from interposer.table import table
from interposer.testing.glossary import CHECKS, STATES

if TYPE_CHECKING:
    from interposer.testing.report import Examined, Finding, Report, State, Tally

__all__ = ["renderables", "summary", "text", "wrong", "wrong_lines"]

_STYLES: dict[State, str] = {"correct": "green", "wrong": "bold red"}


def text(report: Report) -> str:
    """Return the facts as lines; what is wrong stands last."""
    blocks = [_head(report)]
    sound = report.sound_declarations
    blocks += [_candidate_lines(c) for c in report.candidates if c not in sound]
    blocks += [["sound declarations:", *(f"  {c.title}" for c in sound)]] if sound else []
    blocks += [*wrong(report), [summary(report)]]
    return "\n\n".join("\n".join(block) for block in blocks)


def renderables(report: Report) -> Iterator[Any]:
    """Yield what rich prints."""
    from rich.text import Text

    yield Text("\n".join(_head(report)))
    if report.candidates:
        titles = ("for", "candidate", "state", "trials", "dtypes", "reasons", "seconds")
        yield table("candidates", titles, map(_cells, report.candidates))
    for block in wrong(report):
        yield Text("\n".join(block), style="red")
    yield Text(summary(report), style=_STYLES.get(report.state, ""))


def summary(report: Report) -> str:
    """Return one line: the state of the whole, and how many candidates are in which."""
    if not report.candidates:
        return f"not run: {report.distribution} declares nothing that can be verified."
    sound = report.sound_declarations
    found = {state: [c for c in report.in_state(state) if c not in sound] for state in STATES}
    counts = [f"{len(some)} {state}" for state, some in found.items() if some]
    counts += [f"{_number(len(sound), 'declaration')} sound"] if sound else []
    told = f"{report.state}: {', '.join(counts)}"
    if report.state in ("refused", "not run"):
        told += "; nothing ran here, so nothing is proved"
    return f"{told}."


def wrong(report: Report) -> list[list[str]]:
    """Return a block of lines for every aspect in which a candidate is wrong."""
    blocks = []
    for candidate in report.candidates:
        seen = set[str]()  # one traceback of each kind is enough
        blocks += [wrong_lines(candidate, t, seen) for t in candidate.tallies if t.failed]
    return blocks


def _head(report: Report) -> list[str]:
    ground = report.ground
    limits = [f"seed {report.seed}"]
    limits += [f"op {report.op}"] if report.op else []
    limits += [f"case {report.case!r}"] if report.case else []
    limits += ["quick: few cases of each op"] if report.quick else []
    return [
        f"{report.distribution} {report.version}, {report.date}: {', '.join(limits)}",
        f"device: {ground.torch_device} ({ground.device}): platform {ground.platform}, "
        f"{ground.architecture}",
        f"torch {ground.torch}, Python {ground.python}, {ground.system}",
    ]


def _candidate_lines(candidate: Examined) -> list[str]:
    origin = f"{candidate.provider} {candidate.version}"
    dtypes = f" in {', '.join(candidate.dtypes)}" if candidate.dtypes else ""
    lines = [f"{candidate.title} ({origin}): {candidate.state}{dtypes}"]
    lines += [f"  {tally.aspect}: {_counts(tally)}" for tally in candidate.tallies]
    return [*lines, *(f"  {reason}" for reason in _reasons(candidate))]


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


def _reasons(candidate: Examined) -> Iterator[str]:
    for state in ("refused", "not run"):
        for reason, count in candidate.reasons(state).items():
            times = f", {count} times" if count > 1 else ""
            yield f"{state}: {reason}{times}"


def _cells(candidate: Examined) -> tuple[str, ...]:
    subject = f"{candidate.kind} {candidate.subject}".strip()
    trials = "\n".join(f"{tally.aspect}: {_trials(tally)}" for tally in candidate.tallies)
    reasons = "\n".join(_reasons(candidate))
    seconds = f"{candidate.seconds:.1f}" if candidate.ran else ""
    dtypes = "\n".join(candidate.dtypes)
    return subject, candidate.name, candidate.state, trials, dtypes, reasons, seconds


def _trials(tally: Tally) -> str:
    return f"{tally.passed} of {tally.ran} passed" if tally.ran else tally.state


def wrong_lines(candidate: Examined, tally: Tally, seen: set[str] | None = None) -> list[str]:
    """Return the faults that a tally keeps, and how to see them again.

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


def _finding_lines(finding: Finding, seen: set[str]) -> Iterator[str]:
    yield f"{finding.where}: {finding.reason}"
    if finding.check in CHECKS:
        yield f"  ({finding.check}: {CHECKS[finding.check]})"
    if finding.reason not in seen:
        yield from (f"    {line}" for line in finding.traceback.splitlines())
    seen.add(finding.reason)
