"""Tables for the report of ``interposer verify`` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from interposer_testing import Examined, Report, Tally, reason_lines, wrong_blocks
from interposer_tools._rich_table import table

_STYLES = {"correct": "green", "wrong": "bold red"}


def report_tables(report: Report) -> Iterator[Any]:
    """Yield the head, the table of candidates, the failures and the summary for rich."""
    yield Text("\n".join(report.head))
    if report.candidates:
        titles = ("for", "candidate", "state", "trials", "dtypes", "reasons", "seconds")
        yield table("candidates", titles, map(_cells, report.candidates))
    for block in wrong_blocks(report.candidates):
        yield Text("\n".join(block), style="red")
    yield Text(report.summary, style=_STYLES.get(report.state, ""))


def _cells(candidate: Examined) -> tuple[str, ...]:
    subject = f"{candidate.kind} {candidate.subject}".strip()
    trials = "\n".join(f"{tally.aspect}: {_trials(tally)}" for tally in candidate.tallies)
    reasons = "\n".join(reason_lines(candidate))
    seconds = f"{candidate.seconds:.1f}" if candidate.ran else ""
    dtypes = "\n".join(candidate.dtypes)
    return subject, candidate.name, candidate.state, trials, dtypes, reasons, seconds


def _trials(tally: Tally) -> str:
    return f"{tally.passed} of {tally.ran} passed" if tally.ran else tally.state
