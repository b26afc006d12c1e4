"""What a verification found, as data that a JSON file can hold: counts, faults and reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from interposer.errors import StorageError
from interposer.storage import write_text

__all__ = [
    "NO_CASE",
    "STATIC",
    "VERSION",
    "Examined",
    "Finding",
    "Ground",
    "Report",
    "State",
    "Tally",
]

VERSION = 1
"""Of what ``Report.to_dict`` returns."""

NO_CASE = "the suite has no case for it"
STATIC = frozenset({"records", "lightness"})
"""Aspects that are checked without running a candidate, so that they prove nothing of results."""
_DECLARATIONS = frozenset(
    {"checkpoint", "device description", "module", "platform", "tuning table"}
)

State = Literal["correct", "wrong", "refused", "not run"]


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a verification ran.

    Attributes:
        device: the platform's name for it, as ``"EPYC 9B45"``.
        torch_device: what tensors were placed on.
        versions: of the distributions that took part, by name.
    """

    device: str
    platform: str
    torch_device: str
    architecture: str
    system: str
    python: str
    torch: str
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault with what somebody needs to see it again.

    Attributes:
        check, where, reason, traceback: see ``Fault``.
        dtype: of the request, empty where it does not matter.
        case: the label of the case.
        command: a command line that runs this case alone.
    """

    check: str
    where: str
    reason: str
    dtype: str
    case: str
    command: str
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Tally:
    """One aspect of one candidate, counted over its cases in all dtypes.

    Attributes:
        aspect: what was checked, such as ``"numerics"``.
        passed, failed: trials that ran, without a fault and with any.
        refused: trials that the candidate does not take, by the reason that it gave.
        not_run: trials that could not be tried here, by reason.
        cases: distinct cases among the trials that ran.
        seconds: that they took.
        findings: the faults of the first few trials that failed.
    """

    aspect: str
    passed: int = 0
    failed: int = 0
    refused: Mapping[str, int] = field(default_factory=dict, hash=False)
    not_run: Mapping[str, int] = field(default_factory=dict, hash=False)
    cases: int = 0
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()

    @property
    def ran(self) -> int:
        """How many trials ran, whatever came of them."""
        return self.passed + self.failed

    @property
    def state(self) -> State:
        """What is to be said of the aspect: one word."""
        return _state([self])


@dataclass(frozen=True, slots=True)
class Examined:
    """One candidate: what was found of it, or why it was not looked at.

    Attributes:
        kind, subject: what it is a candidate for, as ``"kernel"`` and the name of an op.
        name, provider, version: of the candidate and its distribution.
        platform: that it is for; empty for any.
        dtypes: that it took and ran in.
        absent: why there was no trial of it; empty where there was one.
    """

    kind: str
    subject: str
    name: str
    provider: str
    version: str
    platform: str = ""
    dtypes: tuple[str, ...] = ()
    tallies: tuple[Tally, ...] = ()
    absent: str = ""

    @property
    def is_declaration(self) -> bool:
        """Whether there is nothing to run: what is declared can only hold or not."""
        return self.kind in _DECLARATIONS

    @property
    def state(self) -> State:
        """Correct only if it ran here and nothing was wrong."""
        if self.failed or self.is_declaration:
            return _state(self.tallies)
        return _state([tally for tally in self.tallies if tally.aspect not in STATIC])

    @property
    def title(self) -> str:
        """The candidate and what it is for, for people."""
        if self.is_declaration:
            return f"{self.kind} {self.name}"
        return f"{self.name} for {self.kind}" + (f" {self.subject!r}" if self.subject else "")

    @property
    def ran(self) -> int:
        """How many trials ran."""
        return sum(tally.ran for tally in self.tallies)

    @property
    def failed(self) -> int:
        """How many trials found a fault."""
        return sum(tally.failed for tally in self.tallies)

    @property
    def seconds(self) -> float:
        """What the trials took."""
        return sum(tally.seconds for tally in self.tallies)

    def reasons(self, state: Literal["refused", "not run"]) -> dict[str, int]:
        """Return why trials were refused or not run, the most frequent first."""
        counts: dict[str, int] = {}
        for tally in self.tallies:
            for reason, count in (tally.refused if state == "refused" else tally.not_run).items():
                counts[reason] = counts.get(reason, 0) + count
        if state == "not run" and not counts and self.state == "not run":
            counts[self.absent or NO_CASE] = 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one verification found.

    Attributes:
        distribution: whose records were verified, of ``version``.
        date: when it began, in UTC, as ``"2026-03-01T12:00:00Z"``.
        op, case: what it was limited to; empty where it was not.
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
        """What is only declared, and holds."""
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

    def __str__(self) -> str:
        from interposer.testing.report_text import text

        return text(self)

    def __rich_console__(self, _console: object, _options: object) -> Iterator[Any]:
        from interposer.testing.report_text import renderables

        yield from renderables(self)


def _state(tallies: Sequence[Tally]) -> State:
    if any(tally.failed for tally in tallies):
        return "wrong"
    if any(tally.passed for tally in tallies):
        return "correct"
    return "refused" if any(tally.refused for tally in tallies) else "not run"


def _examined(facts: dict[str, Any]) -> Examined:
    tallies = tuple(map(_tally, facts.pop("tallies")))
    return Examined(dtypes=tuple(facts.pop("dtypes")), tallies=tallies, **_fields(Examined, facts))


def _tally(facts: dict[str, Any]) -> Tally:
    findings = tuple(Finding(**_fields(Finding, f)) for f in facts.pop("findings"))
    return Tally(findings=findings, **_fields(Tally, facts))


def _fields(kind: type, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that ``kind`` has; others follow from them, or were added later."""
    return {field.name: facts[field.name] for field in fields(kind) if field.name in facts}
