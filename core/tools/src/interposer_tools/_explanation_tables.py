"""Tables for the report of ``interposer explain`` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from interposer import Explanation
from interposer.tooling import Row, Subject, answer, figures
from interposer_tools._rich_table import table


def explanation_tables(explanation: Explanation) -> Iterator[Any]:
    """Yield the head and the tables of settings, choices, candidates and failures, for rich."""
    yield Text(explanation.head)
    if explanation.policy:
        entries = [(str(s), s.value, s.source) for s in explanation.policy]
        yield table("policy", ("setting", "value", "source"), entries)
    if explanation.rows:
        titles = ("request", "places", "chosen", "provider", "why", "not chosen")
        yield table("choices", titles, [_row_cells(r, explanation.full) for r in explanation.rows])
    if explanation.subjects:
        titles = ("for", "candidate", "provider", "score", "platform", "on this device")
        options = [cells for subject in explanation.subjects for cells in _subject_cells(subject)]
        yield table("candidates", titles, options)
    if explanation.failures:
        failures = [(f.candidate, f.provider, f.reason) for f in explanation.failures]
        yield table("failed while running", ("kernel", "provider", "reason"), failures)


def _row_cells(row: Row, full: bool) -> tuple[str, ...]:
    choice = row.choice
    places = "\n".join(p or "(model)" for p in row.prefixes) if full else str(len(row.prefixes))
    if choice.request.kind == "platform":
        places = "all"
    measured = ["measured:", *figures(choice)] if choice.seconds else []
    why = "\n".join((choice.why, *measured, *choice.notes))
    refused = "\n".join(f"{r.candidate}: {r.reason}" for r in choice.refusals) or "-"
    return str(choice.request), places, choice.chosen.name, choice.chosen.origin, why, refused


def _subject_cells(subject: Subject) -> Iterator[tuple[str, ...]]:
    title = str(subject)
    for option in subject.options:
        candidate = option.candidate
        platform = option.platform or "any"
        score = f"{candidate.score:g}"
        yield title, candidate.name, candidate.origin, score, platform, answer(option)
        title = ""
