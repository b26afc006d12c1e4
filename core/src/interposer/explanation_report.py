"""How an ``Explanation`` reads: as plain text, and as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from interposer.choice import Choice
from interposer.inventory import Option, Subject, requirements
from interposer.table import table
from interposer.verdict import Refusal

if TYPE_CHECKING:
    from interposer.explanation import Explanation, Row

__all__ = ["renderables", "text"]


def text(explanation: Explanation) -> str:
    """Return a block of lines for every choice."""
    full = explanation.full
    blocks = [_head(explanation)]
    if explanation.policy:
        lines = (
            f"  {setting} = {setting.value} ({setting.source})" for setting in explanation.policy
        )
        blocks.append(["policy:", *lines])
    blocks += [_row_lines(row, full) for row in explanation.rows]
    blocks += [_subject_lines(subject, full) for subject in explanation.subjects]
    if explanation.failures:
        blocks.append(["failed while running:", *_refused(explanation.failures, full, "  ")])
    return "\n\n".join("\n".join(block) for block in blocks)


def renderables(explanation: Explanation) -> Iterator[Any]:
    """Yield what rich prints."""
    from rich.text import Text

    yield Text("\n".join(_head(explanation)))
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


def _head(explanation: Explanation) -> list[str]:
    device = explanation.device
    notes = (f"note: {note}" for note in explanation.notes)
    return [f"device: {device.torch_device} ({device.name})", *notes]


def _row_lines(row: Row, full: bool) -> list[str]:
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
        lines.append(f"     measured: {', '.join(_figures(choice))}")
    lines += [f"     note: {note}" for note in choice.notes]
    return [*lines, *_refused(choice.refusals, full, "     not ")]


def _refused(refusals: Iterable[Refusal], full: bool, start: str) -> Iterator[str]:
    for refusal in refusals:
        yield f"{start}{refusal}"
        if full:
            yield from (f"         {line}" for line in refusal.traceback.splitlines())


def _subject_lines(subject: Subject, full: bool) -> list[str]:
    lines = [str(subject)]
    for option in subject.options:
        candidate = option.candidate
        where = f" on {option.platform}" if option.platform else ""
        what = f"{candidate.name} ({candidate.origin}): score {candidate.score:g}{where}"
        lines.append(f"  {what}, {_answer(option)}")
        if full:
            lines.append(f"      target: {getattr(candidate.record, 'target', '')}")
            lines += [f"      needs {need}" for need in requirements(candidate)]
            if candidate.properties:
                lines.append(f"      promises {', '.join(sorted(candidate.properties))}")
    return lines


def _answer(option: Option) -> str:
    return "fits the device" if option.verdict else f"refused: {option.verdict.reason}"


def _row_cells(row: Row, full: bool) -> tuple[str, ...]:
    choice = row.choice
    places = "\n".join(p or "(model)" for p in row.prefixes) if full else str(len(row.prefixes))
    if choice.request.kind == "platform":
        places = "all"
    measured = ["measured:", *_figures(choice)] if choice.seconds else []
    why = "\n".join((choice.why, *measured, *choice.notes))
    refused = "\n".join(f"{r.candidate}: {r.reason}" for r in choice.refusals) or "-"
    return str(choice.request), places, choice.chosen.name, choice.chosen.origin, why, refused


def _subject_cells(subject: Subject) -> Iterator[tuple[str, ...]]:
    title = str(subject)
    for option in subject.options:
        candidate = option.candidate
        platform = option.platform or "any"
        score = f"{candidate.score:g}"
        yield title, candidate.name, candidate.origin, score, platform, _answer(option)
        title = ""


def _figures(choice: Choice) -> list[str]:
    """Return what the candidates took, the fastest first."""
    fastest_first = sorted(choice.seconds.items(), key=lambda item: (item[1], item[0]))
    return [f"{name} {_duration(seconds)}" for name, seconds in fastest_first]


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
