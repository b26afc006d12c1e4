"""The support matrix of one or more reports: a row for each candidate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interposer_testing._reports.facts import Examined, State, Tally
from interposer_testing._reports.report import Report


@dataclass(frozen=True, slots=True)
class Cell:
    """A state, and in words its evidence; no state if there is nothing to say."""

    state: State | None = None
    text: str = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate: what it is for, its name with its provider's, and its cells."""

    subject: str
    name: str
    provider: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A table of candidates: by aspects of one report, by devices of several."""

    titles: tuple[str, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, reports: Sequence[Report]) -> Matrix:
        """Return the matrix of reports, candidates in the order in which they first occur."""
        if len(reports) == 1:
            (report,) = reports
            shown = _shown(report)
            tried = {tally.aspect for candidate in shown for tally in candidate.tallies}
            aspects = [aspect for aspect in report.aspects if aspect in tried]
            rows = tuple(_row(candidate, _by_aspect(candidate, aspects)) for candidate in shown)
            return cls(("state", "dtypes", *aspects), rows)
        found = dict[tuple[str, ...], dict[int, "Examined"]]()
        for number, report in enumerate(reports):
            for candidate in _shown(report):
                found.setdefault(_key(candidate), {})[number] = candidate
        rows = tuple(
            _row(next(iter(by.values())), [_by_device(by.get(n)) for n in range(len(reports))])
            for by in found.values()
        )
        return cls(_devices(reports), rows)


def _shown(report: Report) -> list[Examined]:
    """Return the candidates without what is only declared, and holds."""
    sound = report.sound_declarations
    return [candidate for candidate in report.candidates if candidate not in sound]


def _key(candidate: Examined) -> tuple[str, ...]:
    return candidate.kind, candidate.subject, candidate.provider, candidate.name


def _row(candidate: Examined, cells: list[Cell]) -> Row:
    subject = f"{candidate.kind} {candidate.subject}".strip()
    return Row(subject, candidate.name, candidate.provider, tuple(cells))


def _by_aspect(candidate: Examined, aspects: Sequence[str]) -> list[Cell]:
    tallies = {tally.aspect: tally for tally in candidate.tallies}
    cells = [Cell(candidate.state, candidate.state), Cell(None, _dtypes(candidate) or "-")]
    return cells + [
        _of_tally(tallies[aspect]) if aspect in tallies else Cell() for aspect in aspects
    ]


def _of_tally(tally: Tally) -> Cell:
    if not tally.ran:
        return Cell(tally.state, tally.state)
    counts = f"{tally.failed} of {tally.ran}" if tally.failed else f"{tally.ran}"
    return Cell(tally.state, f"{tally.state} ({counts})")


def _by_device(candidate: Examined | None) -> Cell:
    if candidate is None:
        return Cell()
    dtypes = _dtypes(candidate)
    return Cell(candidate.state, f"{candidate.state}: {dtypes}" if dtypes else candidate.state)


def _dtypes(candidate: Examined) -> str:
    return ", ".join(candidate.dtypes)


def _devices(reports: Sequence[Report]) -> tuple[str, ...]:
    names = [f"{report.ground.device} ({report.ground.platform})" for report in reports]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return tuple(
        f"{name}, {report.date}" if name in twice else name
        for name, report in zip(names, reports, strict=True)
    )
