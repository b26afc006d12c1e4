"""Verification reports as one Markdown page with a support matrix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from interposer_testing._reports.legend import ASPECTS, STATES
from interposer_testing._reports.matrix import Matrix
from interposer_testing._reports.text import wrong_blocks

if TYPE_CHECKING:
    from interposer_testing._reports.report import Report

# Characters that Markdown would read as formatting, in tables also "|".
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def markdown(reports: Sequence[Report]) -> str:
    """Render reports as a Markdown page: devices, support matrix, reasons, faults and legend."""
    names = dict.fromkeys(f"{report.distribution} {report.version}" for report in reports)
    blocks = [[f"# Support matrix: {_plain(', '.join(names))}"], [*_grounds(reports)]]
    matrix = Matrix.of(reports)
    rows = [
        (row.subject, f"{row.name} ({row.provider})", *(cell.text for cell in row.cells))
        for row in matrix.rows
    ]
    if rows:
        blocks.append([*_table(("for", "candidate", *matrix.titles), rows)])
    for report in reports:
        where = f" on {_plain(report.ground.device)}" if len(reports) > 1 else ""
        reasons = [*_reasons(report)]
        if reasons:
            blocks += [[f"## Refused or not run{where}"], reasons]
        faults = wrong_blocks(report.candidates)
        if faults:
            blocks.append([f"## Wrong{where}"])
            blocks += [_fenced(lines) for lines in faults]
    blocks += [["## Legend"], [*_legend(reports)]]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _grounds(reports: Sequence[Report]) -> Iterator[str]:
    titles = ("device", "platform", "torch", "Python", "date", "seed", "cases", "result")
    rows = [
        (
            f"{report.ground.device}, {report.ground.architecture}",
            report.ground.platform,
            report.ground.torch,
            report.ground.python,
            report.date,
            str(report.seed),
            report.case or ("few" if report.quick else "all"),
            report.summary,
        )
        for report in reports
    ]
    return _table(titles, rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(map(_plain, titles))} |"
    yield f"|{'---|' * len(titles)}"
    for cells in rows:
        yield f"| {' | '.join(map(_plain, cells))} |"


def _reasons(report: Report) -> Iterator[str]:
    for candidate in report.candidates:
        for state in ("refused", "not run"):
            for reason, count in candidate.reasons(state).items():
                times = f" ({count} times)" if count > 1 else ""
                yield _plain(f"- {candidate.title}, {state}: {reason}{times}")


def _fenced(lines: Sequence[str]) -> list[str]:
    """Format lines as a code block, with a fence longer than any run of backticks in the lines."""
    longest_run = max(map(len, re.findall("`+", "\n".join(lines))), default=0)
    fence = "`" * max(3, longest_run + 1)
    return [f"{fence}text", *lines, fence]


def _legend(reports: Sequence[Report]) -> Iterator[str]:
    for word, meaning in STATES.items():
        yield f"- {word}: {meaning}"
    for aspect in dict.fromkeys(aspect for report in reports for aspect in report.aspects):
        if aspect in ASPECTS:
            yield f"- {aspect}: {ASPECTS[aspect]}"


def _plain(text: str) -> str:
    """Escape ``text`` for Markdown, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
