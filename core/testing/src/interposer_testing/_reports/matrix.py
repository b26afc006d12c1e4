"""The support matrix of one or more reports, with one row per candidate."""

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
    """A table cell: text such as counts or dtypes, and a state, or None for text only."""

    state: State | None = None
    text: str = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the matrix: subject, name and provider of a candidate, and cells."""

    subject: str
    name: str
    provider: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A table of candidates, with aspects as columns for one report, devices for several."""

    titles: tuple[str, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, reports: Sequence[Report]) -> Matrix:
        """Build the matrix, with candidates in order of first occurrence."""
        # One report has room for a column per aspect; several reports get one column per device.
        if len(reports) == 1:
            (report,) = reports
            candidates = _listed(report)
            aspects_in_use = {t.aspect for candidate in candidates for t in candidate.tallies}
            aspects = [aspect for aspect in report.aspects if aspect in aspects_in_use]
            rows = tuple(_row(c, _cells_by_aspect(c, aspects)) for c in candidates)
            return cls(("state", "dtypes", *aspects), rows)
        by_key = dict[tuple[str, ...], dict[int, "Examined"]]()
        for number, report in enumerate(reports):
            for candidate in _listed(report):
                by_key.setdefault(_key(candidate), {})[number] = candidate
        rows = tuple(
            _row(
                next(iter(by_report.values())),
                [_device_cell(by_report.get(number)) for number in range(len(reports))],
            )
            for by_report in by_key.values()
        )
        return cls(_devices(reports), rows)


def _listed(report: Report) -> list[Examined]:
    """Return the candidates of a report, without correct declarations."""
    sound = report.sound_declarations
    return [candidate for candidate in report.candidates if candidate not in sound]


def _key(candidate: Examined) -> tuple[str, ...]:
    return candidate.kind, candidate.subject, candidate.provider, candidate.name


def _row(candidate: Examined, cells: list[Cell]) -> Row:
    subject = f"{candidate.kind} {candidate.subject}".strip()
    return Row(subject, candidate.name, candidate.provider, tuple(cells))


def _cells_by_aspect(candidate: Examined, aspects: Sequence[str]) -> list[Cell]:
    tallies = {tally.aspect: tally for tally in candidate.tallies}
    cells = [Cell(candidate.state, candidate.state), Cell(None, _dtypes(candidate) or "-")]
    return cells + [
        _tally_cell(tallies[aspect]) if aspect in tallies else Cell() for aspect in aspects
    ]


def _tally_cell(tally: Tally) -> Cell:
    if not tally.ran:
        return Cell(tally.state, tally.state)
    counts = f"{tally.failed} of {tally.ran}" if tally.failed else f"{tally.ran}"
    return Cell(tally.state, f"{tally.state} ({counts})")


def _device_cell(candidate: Examined | None) -> Cell:
    if candidate is None:
        return Cell()
    dtypes = _dtypes(candidate)
    return Cell(candidate.state, f"{candidate.state}: {dtypes}" if dtypes else candidate.state)


def _dtypes(candidate: Examined) -> str:
    return ", ".join(candidate.dtypes)


def _devices(reports: Sequence[Report]) -> tuple[str, ...]:
    names = [f"{report.ground.device} ({report.ground.platform})" for report in reports]
    # Two reports from equal devices are told apart by their dates.
    ambiguous = {name for name, count in Counter(names).items() if count > 1}
    return tuple(
        f"{name}, {report.date}" if name in ambiguous else name
        for name, report in zip(names, reports, strict=True)
    )
