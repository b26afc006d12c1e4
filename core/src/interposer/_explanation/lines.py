"""Choices and candidates as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from interposer._contract.choice import Choice
from interposer._contract.verdict import Refusal
from interposer._explanation.inventory import Option, Subject, requirements
from interposer._selection.figures import duration


@dataclass(frozen=True, slots=True)
class Row:
    """One distinct choice with the places in the model that share it."""

    choice: Choice
    prefixes: tuple[str, ...]


def row_lines(row: Row, full: bool) -> list[str]:
    """Return the block of one choice: what was chosen and why, and what was not."""
    choice = row.choice
    first, *others = (prefix or "(model)" for prefix in row.prefixes)
    if choice.request.kind == "platform":
        lines = [str(choice.request)]  # it is for all places
    elif full and others:
        lines = [f"{choice.request}, at", *(f"  {place}" for place in (first, *others))]
    else:
        more = f" and {len(others)} more" if others else ""
        lines = [f"{choice.request}, at {first}{more}"]
    lines.append(f"  -> {choice.chosen.name} ({choice.chosen.origin}): {choice.why}")
    if choice.seconds:
        lines.append(f"     measured: {', '.join(figures(choice))}")
    lines += [f"     note: {note}" for note in choice.notes]
    return [*lines, *refused_lines(choice.refusals, full, "     not ")]


def refused_lines(refusals: Iterable[Refusal], full: bool, start: str) -> Iterator[str]:
    """Yield a line for every refusal, in full with its traceback."""
    for refusal in refusals:
        yield f"{start}{refusal}"
        if full:
            yield from (f"         {line}" for line in refusal.traceback.splitlines())


def subject_lines(subject: Subject, full: bool) -> list[str]:
    """Return the block of one subject: its candidates, and whether the device would do."""
    lines = [str(subject)]
    for option in subject.options:
        candidate = option.candidate
        where = f" on {option.platform}" if option.platform else ""
        what = f"{candidate.name} ({candidate.origin}): score {candidate.score:g}{where}"
        lines.append(f"  {what}, {answer(option)}")
        if full:
            lines.append(f"      target: {getattr(candidate.record, 'target', '')}")
            lines += [f"      needs {need}" for need in requirements(candidate)]
            if candidate.properties:
                lines.append(f"      promises {', '.join(sorted(candidate.properties))}")
    return lines


def answer(option: Option) -> str:
    """Return whether the device would do for a candidate."""
    return "fits the device" if option.verdict else f"refused: {option.verdict.reason}"


def figures(choice: Choice) -> list[str]:
    """Return what the candidates took, the fastest first."""
    fastest_first = sorted(choice.seconds.items(), key=lambda item: (item[1], item[0]))
    return [f"{name} {duration(seconds, digits=3)}" for name, seconds in fastest_first]
