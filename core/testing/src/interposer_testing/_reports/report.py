"""The report of a verification, as text and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from interposer.errors import StorageError
from interposer.tooling import write_text
from interposer_testing._reports.facts import Examined, Finding, Ground, State, Tally
from interposer_testing._reports.text import candidate_lines, state_counts, wrong_blocks

VERSION = 1
"""Version of the format that ``Report.to_dict`` returns."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one verification of a distribution.

    Attributes:
        distribution: name of the verified distribution.
        version: version of the distribution.
        date: start of the verification in UTC, such as ``"2026-03-01T12:00:00Z"``.
        op, case: the op and the case that the verification was limited to; empty if not limited.
        host: name and version of the engine whose layers ran the kernels; empty if none.
        quick: whether only few cases per op were run.
        seconds: total duration, including the building of cases.
    """

    distribution: str
    version: str
    ground: Ground
    date: str
    seed: int
    quick: bool
    op: str = ""
    case: str = ""
    host: str = ""
    seconds: float = 0.0
    candidates: tuple[Examined, ...] = ()

    @property
    def state(self) -> State:
        """State of the distribution: wrong if any candidate is wrong, else correct if any ran.

        Correct declarations count only if there are no other candidates.
        """
        states = {c.state for c in self.candidates if c.state == "wrong" or not c.is_declaration}
        states = states or {c.state for c in self.candidates}
        # The first of these states that occurs is the state of the distribution.
        order: tuple[State, ...] = ("wrong", "correct", "refused")
        return next((state for state in order if state in states), "not run")

    @property
    def aspects(self) -> list[str]:
        """All aspects, in order of first occurrence."""
        tallies = (tally for candidate in self.candidates for tally in candidate.tallies)
        return list(dict.fromkeys(tally.aspect for tally in tallies))

    def in_state(self, state: State) -> list[Examined]:
        """Return the candidates whose state is ``state``."""
        return [candidate for candidate in self.candidates if candidate.state == state]

    @property
    def sound_declarations(self) -> list[Examined]:
        """The correct declarations, such as device descriptions."""
        return [c for c in self.in_state("correct") if c.is_declaration]

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to lists and dictionaries, adding states of candidates and tallies."""
        facts = {"format": VERSION, "state": self.state, **asdict(self)}
        for candidate, candidate_facts in zip(self.candidates, facts["candidates"], strict=True):
            candidate_facts["state"] = candidate.state
            for tally, tally_facts in zip(
                candidate.tallies, candidate_facts["tallies"], strict=True
            ):
                tally_facts["state"] = tally.state
        return facts

    def to_json(self) -> str:
        """Return the report as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Create a report from the text that ``to_json`` returned.

        Raises: ValueError: the text is no report, or has a later format.
        """
        try:
            facts = json.loads(text)
            if facts["format"] != VERSION:
                raise ValueError(f"it has the format {facts['format']!r}, must be {VERSION}")
            return cls(
                ground=Ground(**_fields(Ground, facts.pop("ground"))),
                candidates=tuple(map(_examined, facts.pop("candidates"))),
                **_fields(cls, facts),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is no report of a verification: {error!r}") from error

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a report from a file that ``write`` wrote.

        Raises: StorageError: the file cannot be read, or is no report.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            remedy = "interposer verify DISTRIBUTION --json FILE writes one"
            raise StorageError(path, f"cannot be read as a report: {error}", remedy) from error

    def write(self, path: Path) -> None:
        """Write the report as JSON to a file.

        Raises: StorageError: the file cannot be written.
        """
        write_text(path, self.to_json() + "\n")

    @property
    def summary(self) -> str:
        """One line with the state of the distribution and the number of candidates per state."""
        if not self.candidates:
            return f"not run: {self.distribution} declares nothing that can be verified."
        text = f"{self.state}: {state_counts(self.candidates)}"
        if self.state in ("refused", "not run"):
            text += "; nothing ran here, so nothing is proved"
        return f"{text}."

    @property
    def head(self) -> list[str]:
        """The lines about distribution, options and device."""
        ground = self.ground
        limits = [f"seed {self.seed}"]
        limits += [f"op {self.op}"] if self.op else []
        limits += [f"case {self.case!r}"] if self.case else []
        limits += [f"in layers of {self.host}"] if self.host else []
        limits += ["quick: few cases of each op"] if self.quick else []
        return [
            f"{self.distribution} {self.version}, {self.date}: {', '.join(limits)}",
            f"device: {ground.torch_device} ({ground.device}): platform {ground.platform}, "
            f"{ground.architecture}",
            f"torch {ground.torch}, Python {ground.python}, {ground.system}",
        ]

    def __str__(self) -> str:
        blocks = [self.head]
        # Correct declarations are listed in one block, as they have no counts to show.
        sound = self.sound_declarations
        blocks += [candidate_lines(c) for c in self.candidates if c not in sound]
        blocks += [["sound declarations:", *(f"  {c.title}" for c in sound)]] if sound else []
        blocks += [*wrong_blocks(self.candidates), [self.summary]]
        return "\n\n".join("\n".join(block) for block in blocks)


def _examined(facts: dict[str, Any]) -> Examined:
    tallies = tuple(map(_tally, facts.pop("tallies")))
    return Examined(dtypes=tuple(facts.pop("dtypes")), tallies=tallies, **_fields(Examined, facts))


def _tally(facts: dict[str, Any]) -> Tally:
    findings = tuple(Finding(**_fields(Finding, f)) for f in facts.pop("findings"))
    return Tally(findings=findings, **_fields(Tally, facts))


def _fields(kind: type, facts: dict[str, Any]) -> dict[str, Any]:
    """Select the entries that are fields of ``kind``; drop derived and unknown entries."""
    return {field.name: facts[field.name] for field in fields(kind) if field.name in facts}
