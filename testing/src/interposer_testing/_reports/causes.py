"""Failed imports that stand behind several faults, so that a report tells each of them once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from interposer_testing._reports.facts import Examined, Finding, Tally


@dataclass(frozen=True, slots=True)
class Cause:
    """One import that fails, and the aspects of candidates that are wrong for nothing else.

    Attributes:
        text: the error and where it was raised.
        first: the first of its findings.
        hits: candidates with their aspects, in the order of the report.
    """

    text: str
    first: Finding
    hits: tuple[tuple[Examined, Tally], ...]

    @property
    def title(self) -> str:
        """The cause and the number of records that it hits, for people."""
        count = len(self.hit_lines)
        return f"{count} record{'s' if count > 1 else ''}, by one import that fails: {self.text}"

    @property
    def hit_lines(self) -> list[str]:
        """A line for each candidate that is hit, with the aspects that are wrong."""
        aspects = dict[str, list[str]]()
        for candidate, tally in self.hits:
            aspects.setdefault(candidate.title, []).append(tally.aspect)
        return [f"{title}: {', '.join(some)}" for title, some in aspects.items()]


def shared_causes(candidates: Iterable[Examined]) -> list[Cause]:
    """Return the causes that more than one aspect or candidate has in common."""
    hits = dict[str, list[tuple[Examined, Tally]]]()
    for candidate in candidates:
        for tally in candidate.tallies:
            if cause := _only_cause(tally):
                hits.setdefault(cause, []).append((candidate, tally))
    return [
        Cause(text, some[0][1].findings[0], tuple(some))
        for text, some in hits.items()
        if len(some) > 1
    ]


def is_told(tally: Tally, causes: Collection[Cause]) -> bool:
    """Say whether ``causes`` tell everything that is wrong in an aspect."""
    return _only_cause(tally) in {cause.text for cause in causes}


def _only_cause(tally: Tally) -> str:
    """Return the cause that all findings of an aspect share, empty where they do not."""
    causes = {finding.cause for finding in tally.findings}
    return causes.pop() if len(causes) == 1 else ""
