"""The report of a verification: everything that it found, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from interposer.errors import StorageError
from interposer.tooling import write_text
from interposer_testing._reports.facts import Examined, Finding, Ground, State, Tally
from interposer_testing._reports.text import candidate_lines, counted, wrong_blocks

VERSION = 1
"""Of what ``Report.to_dict`` returns."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one verification found.

    Attributes:
        distribution: whose records were verified, of ``version``.
        date: when it began, in UTC, as ``"2026-03-01T12:00:00Z"``.
        op, case: what it was limited to; empty where it was not.
        host: name and version of the engine in whose layers kernels were tried; empty where none.
        quick: whether only few cases of each op were tried.
        seconds: that all of it took, the making of cases included.
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
        """Wrong if any candidate is; correct if any ran; else refused, or not run.

        What is only declared counts where it is wrong, or where there is nothing else.
        """
        everyone = self.candidates
        states = {c.state for c in everyone if c.state == "wrong" or not c.is_declaration}
        states = states or {c.state for c in everyone}
        order: tuple[State, ...] = ("wrong", "correct", "refused")
        return next((state for state in order if state in states), "not run")

    @property
    def aspects(self) -> list[str]:
        """The aspects in the order in which they first occur."""
        tallies = (tally for candidate in self.candidates for tally in candidate.tallies)
        return list(dict.fromkeys(tally.aspect for tally in tallies))

    def in_state(self, state: State) -> list[Examined]:
        """Return the candidates of which ``state`` is to be said."""
        return [candidate for candidate in self.candidates if candidate.state == state]

    @property
    def sound_declarations(self) -> list[Examined]:
        """The candidates that are only declared, and hold."""
        return [c for c in self.in_state("correct") if c.is_declaration]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and dictionaries; what follows from others is there for readers."""
        facts = {"format": VERSION, "state": self.state, **asdict(self)}
        for candidate, told in zip(self.candidates, facts["candidates"], strict=True):
            told["state"] = candidate.state
            for tally, row in zip(candidate.tallies, told["tallies"], strict=True):
                row["state"] = tally.state
        return facts

    def to_json(self) -> str:
        """Return ``to_dict()`` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return what ``to_json`` was asked of.

        Raises: ValueError: the text is something else, or of a later version.
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
        """Return what a file holds.

        Raises: StorageError: it cannot be read, or holds something else.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            mend = "interposer verify DISTRIBUTION --json FILE writes one"
            raise StorageError(path, f"cannot be read as a report: {error}", mend) from error

    def write(self, path: Path) -> None:
        """Write ``to_json()`` into a file.

        Raises: StorageError: the file cannot be written.
        """
        write_text(path, self.to_json() + "\n")

    @property
    def summary(self) -> str:
        """One line: the state of the whole, and the number of candidates in each state."""
        if not self.candidates:
            return f"not run: {self.distribution} declares nothing that can be verified."
        told = f"{self.state}: {counted(self.candidates)}"
        if self.state in ("refused", "not run"):
            told += "; nothing ran here, so nothing is proved"
        return f"{told}."

    @property
    def head(self) -> list[str]:
        """The heading of a report, line by line: distribution, device and limits."""
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
    """Return the facts that ``kind`` has; others follow from them, or were added later."""
    return {field.name: facts[field.name] for field in fields(kind) if field.name in facts}
