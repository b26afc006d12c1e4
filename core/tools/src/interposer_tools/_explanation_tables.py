"""Tables for the report of ``interposer explain`` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from interposer import Explanation
from interposer.tooling import (
    Row,
    Subject,
    answer,
    figures,
    options_here,
    places_summary,
    refused_lines,
    subject_summary,
)
from interposer_tools._rich_table import table


def explanation_tables(explanation: Explanation) -> Iterator[Any]:
    """Yield the head and the tables of settings, choices, candidates and failures for rich."""
    is_complete = explanation.all_candidates
    yield Text(explanation.head)
    if explanation.policy:
        entries = [(str(s), s.value, s.source) for s in explanation.policy]
        yield table("policy", ("setting", "value", "source"), entries)
    if explanation.rows:
        titles = ("request", "places", "chosen", "provider", "why", "not chosen")
        rows = [_row_cells(row) for row in explanation.rows]
        num_columns = len(titles) if is_complete else len(titles) - 1
        yield table("choices", titles[:num_columns], [cells[:num_columns] for cells in rows])
    if explanation.subjects and is_complete:
        titles = ("for", "candidate", "provider", "score", "platform", "on this device")
        options = [cells for subject in explanation.subjects for cells in _subject_cells(subject)]
        yield table("candidates", titles, options)
    elif explanation.subjects:
        yield Text("\n".join(map(subject_summary, explanation.subjects)))
    if explanation.failures:
        failures = [(f.candidate, f.provider, f.reason) for f in explanation.failures]
        yield table("failed while running", ("kernel", "provider", "reason"), failures)
    if explanation.hint:
        yield Text(explanation.hint)


def _row_cells(row: Row) -> tuple[str, ...]:
    choice = row.choice
    measured = ["measured:", *figures(choice)] if choice.seconds else []
    why = "\n".join((choice.why, *measured, *choice.notes))
    refused = "\n".join(refused_lines(choice.refusals, False, "")) or "-"
    places = places_summary(row)
    return str(choice.request), places, choice.chosen.name, choice.chosen.origin, why, refused


def _subject_cells(subject: Subject) -> Iterator[tuple[str, ...]]:
    title = str(subject)
    options, summary_of_others = options_here(subject)
    for option in options:
        candidate = option.candidate
        platform = option.platform or "any"
        score = f"{candidate.score:g}"
        yield title, candidate.name, candidate.origin, score, platform, answer(option)
        title = ""  # only the first row of a subject shows its title
    if summary_of_others:
        yield title, summary_of_others, "", "", "", ""
