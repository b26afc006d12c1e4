"""Failed imports that cause several faults, so that a report shows each import once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from interposer_testing._reports.facts import Examined, Finding, Tally


@dataclass(frozen=True, slots=True)
class Cause:
    """One failed import, and the (candidate, aspect) pairs that have no other fault.

    Attributes:
        text: the exception and the line that raised it.
        first: the first finding with this cause.
        hits: affected candidates and aspects, in the order of the report.
    """

    text: str
    first: Finding
    hits: tuple[tuple[Examined, Tally], ...]

    @property
    def title(self) -> str:
        """Number of affected records, and the cause."""
        count = len(self.hit_lines)
        return f"{count} record{'s' if count > 1 else ''}, by one import that fails: {self.text}"

    @property
    def hit_lines(self) -> list[str]:
        """One line per affected candidate, with the affected aspects."""
        aspects = dict[str, list[str]]()
        for candidate, tally in self.hits:
            aspects.setdefault(candidate.title, []).append(tally.aspect)
        return [f"{title}: {', '.join(names)}" for title, names in aspects.items()]


def shared_causes(candidates: Iterable[Examined]) -> list[Cause]:
    """Return the causes that more than one aspect or candidate shares."""
    hits = dict[str, list[tuple[Examined, Tally]]]()
    for candidate in candidates:
        for tally in candidate.tallies:
            if cause := _only_cause(tally):
                hits.setdefault(cause, []).append((candidate, tally))
    return [
        Cause(text, pairs[0][1].findings[0], tuple(pairs))
        for text, pairs in hits.items()
        if len(pairs) > 1
    ]


def is_explained(tally: Tally, causes: Collection[Cause]) -> bool:
    """Return whether one of ``causes`` explains all faults of an aspect."""
    return _only_cause(tally) in {cause.text for cause in causes}


def _only_cause(tally: Tally) -> str:
    """Return the cause that all findings of an aspect share, or ""."""
    causes = {finding.cause for finding in tally.findings}
    return causes.pop() if len(causes) == 1 else ""
