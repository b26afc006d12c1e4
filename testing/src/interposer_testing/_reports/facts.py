"""The findings of a verification: faults, tallies and candidates as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

NO_CASE = "the suite has no case for it"
STATIC = frozenset({"records", "lightness", "wheel"})
"""Aspects without a run of the candidate; they prove nothing of its results."""
_DECLARATIONS = frozenset(
    {"checkpoint", "device description", "module", "platform", "tuning table"}
)

State = Literal["correct", "wrong", "refused", "not run"]


@dataclass(frozen=True, slots=True)
class Ground:
    """The device and software of a verification.

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
        check, where, reason, traceback, cause: see ``Fault``.
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
    cause: str = field(default="", repr=False)


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
        """The number of trials that ran, passed or failed."""
        return self.passed + self.failed

    @property
    def state(self) -> State:
        """The state of the aspect, in one word."""
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
        """True if there is nothing to run: a declaration holds or does not."""
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
        """The number of trials that ran."""
        return sum(tally.ran for tally in self.tallies)

    @property
    def failed(self) -> int:
        """The number of trials that found a fault."""
        return sum(tally.failed for tally in self.tallies)

    @property
    def seconds(self) -> float:
        """The seconds of all trials together."""
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


def _state(tallies: Sequence[Tally]) -> State:
    if any(tally.failed for tally in tallies):
        return "wrong"
    if any(tally.passed for tally in tallies):
        return "correct"
    return "refused" if any(tally.refused for tally in tallies) else "not run"
