"""Choices and candidates as text: one line per choice, or all candidates with refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from interposer._contract.choice import Choice
from interposer._contract.verdict import Refusal
from interposer._explanation.inventory import Option, Row, Subject, reads, requirements
from interposer._plugins.acceptance import platform_of_refusal
from interposer._selection.figures import duration


def row_summary(row: Row) -> list[str]:
    """Return one line about a choice, and a line for every note."""
    choice = row.choice
    line = f"{choice.request}: {choice.chosen.name} ({choice.chosen.origin}), {choice.why}"
    if places := places_summary(row):
        line += f"; {places}"
    return [line, *(f"  note: {note}" for note in choice.notes)]


def places_summary(row: Row) -> str:
    """Return the module prefix of a choice or the number of modules; "" for the whole model."""
    if row.choice.request.kind == "platform" or row.prefixes == ("",):
        return ""
    return f"{len(row.prefixes)} places" if len(row.prefixes) > 1 else f"at {row.prefixes[0]}"


def subject_summary(subject: Subject) -> str:
    """Return one line about a subject: the best candidate that fits the device."""
    fitting, num_options = [o for o in subject.options if o.verdict], len(subject.options)
    if not fitting:
        return f"{subject}: no candidate fits the device, of {num_options}"
    best = fitting[0].candidate  # options are sorted by descending score
    line = f"{subject}: {best.name} ({best.origin}), score {best.score:g}"
    if num_options == 1:
        return line
    return f"{line}; {len(fitting)} of {num_options} candidates fit the device"


def row_lines(row: Row, full: bool) -> list[str]:
    """Return the text of one choice: the chosen candidate, the reason, and the refusals."""
    choice = row.choice
    first, *other_places = (prefix or "(model)" for prefix in row.prefixes)
    if choice.request.kind == "platform":
        lines = [str(choice.request)]  # a platform applies to all places
    elif full and other_places:
        lines = [f"{choice.request}, at", *(f"  {place}" for place in (first, *other_places))]
    else:
        suffix = f" and {len(other_places)} more" if other_places else ""
        lines = [f"{choice.request}, at {first}{suffix}"]
    lines.append(f"  -> {choice.chosen.name} ({choice.chosen.origin}): {choice.why}")
    if choice.seconds:
        lines.append(f"     measured: {', '.join(figures(choice))}")
    lines += [f"     {line}" for line in reads(choice.chosen) if full]
    lines += [f"     note: {note}" for note in choice.notes]
    return [*lines, *refused_lines(choice.refusals, full, "     not ")]


def refused_lines(refusals: Iterable[Refusal], full: bool, start: str) -> Iterator[str]:
    """Yield a line for every refused candidate: name, provider and reason.

    Args:
        full: add tracebacks; otherwise one line counts the candidates of other platforms.
    """
    platforms = []
    for refusal in refusals:
        platform = "" if full else platform_of_refusal(refusal.reason)
        if platform:
            platforms.append(platform)
            continue
        yield f"{start}{refusal}"
        if full:
            yield from (f"         {line}" for line in refusal.traceback.splitlines())
    if platforms:
        yield start + _elsewhere(platforms)


def subject_lines(subject: Subject, full: bool) -> list[str]:
    """Return the text of one subject: each candidate, and whether it fits the device.

    Args:
        full: add target, requirements and promises; otherwise one line counts the candidates of
            other platforms.
    """
    lines = [str(subject)]
    options, summary_of_others = (subject.options, "") if full else options_here(subject)
    for option in options:
        candidate = option.candidate
        where = f" on {option.platform}" if option.platform else ""
        summary = f"{candidate.name} ({candidate.origin}): score {candidate.score:g}{where}"
        lines.append(f"  {summary}, {answer(option)}")
        if full:
            lines.append(f"      target: {getattr(candidate.record, 'target', '')}")
            lines += [f"      needs {need}" for need in requirements(candidate)]
            lines += [f"      {line}" for line in reads(candidate)]
            if candidate.properties:
                lines.append(f"      promises {', '.join(sorted(candidate.properties))}")
    return [*lines, f"  {summary_of_others}"] if summary_of_others else lines


def options_here(subject: Subject) -> tuple[tuple[Option, ...], str]:
    """Return the candidates that the device's platform runs, and a line that counts all others."""
    platforms = [platform_of_refusal(option.verdict.reason) for option in subject.options]
    runnable = tuple(
        option
        for option, other_platform in zip(subject.options, platforms, strict=True)
        if not other_platform
    )
    return runnable, _elsewhere([*filter(None, platforms)])


def _elsewhere(platforms: list[str]) -> str:
    """Describe candidates of other platforms, given the platform of each."""
    if not platforms:
        return ""
    names = ", ".join(sorted({*platforms}))
    if len(platforms) == 1:
        return f"1 candidate of another platform: {names}"
    return f"{len(platforms)} candidates of other platforms: {names}"


def answer(option: Option) -> str:
    """Return "fits the device" or "refused", with the reason."""
    reason = f": {option.verdict.reason}" if option.verdict.reason else ""
    return ("fits the device" if option.verdict else "refused") + reason


def figures(choice: Choice) -> list[str]:
    """Return the name and run time of each measured candidate as text, the fastest first."""
    fastest_first = sorted(choice.seconds.items(), key=lambda item: (item[1], item[0]))
    return [f"{name} {duration(seconds, digits=3)}" for name, seconds in fastest_first]
