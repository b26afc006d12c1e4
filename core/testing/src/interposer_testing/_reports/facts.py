"""The results of a verification as plain data: findings, tallies and candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

NO_CASE = "the suite has no case for it"
STATIC = frozenset({"records", "lightness", "wheel"})
"""Aspects that do not run the candidate, and so do not show that its results are correct."""
# Kinds of candidates without code that could run.
_DECLARATIONS = frozenset(
    {"checkpoint", "device description", "module", "platform", "tuning table"}
)

State = Literal["correct", "wrong", "refused", "not run"]


@dataclass(frozen=True, slots=True)
class Ground:
    """The machine of a verification: device and software versions.

    Attributes:
        device: name of the device, such as ``"EPYC 9B45"``.
        torch_device: torch device of the tensors.
        versions: versions of the installed distributions with plugins, by name.
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
    """One fault, with a command that reproduces the fault.

    Attributes:
        check, where, reason, traceback, cause: see ``Fault``.
        dtype: dtype of the request; empty if it has none.
        case: label of the test case.
        command: command line that runs this case alone.
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
    """The counts of one aspect of one candidate, over all cases and dtypes.

    Attributes:
        aspect: the aspect, such as ``"numerics"``.
        passed, failed: number of trials that ran without and with faults.
        refused: number of trials that the candidate refused, by reason.
        not_run: number of trials that cannot run on this machine, by reason.
        cases: number of distinct cases in trials that ran.
        seconds: duration of these trials.
        findings: faults of the first failed trials.
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
        """Number of trials that ran."""
        return self.passed + self.failed

    @property
    def state(self) -> State:
        """State of the aspect: wrong, correct, refused or not run."""
        return _state([self])


@dataclass(frozen=True, slots=True)
class Examined:
    """The results of one candidate, or the reason why it was not tested.

    Attributes:
        kind, subject: purpose of the candidate, such as ``"kernel"`` and the name of an op.
        name, provider, version: name of the candidate; name and version of its distribution.
        platform: required platform; empty for any.
        dtypes: dtypes in which the candidate ran.
        absent: reason why there was no trial; empty if there was one.
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
        """True for records without code to run, such as a device description."""
        return self.kind in _DECLARATIONS

    @property
    def state(self) -> State:
        """State of the candidate: correct only after a run on this machine without faults."""
        if self.failed or self.is_declaration:
            return _state(self.tallies)
        return _state([tally for tally in self.tallies if tally.aspect not in STATIC])

    @property
    def title(self) -> str:
        """Name and purpose of the candidate in one line."""
        if self.is_declaration:
            return f"{self.kind} {self.name}"
        return f"{self.name} for {self.kind}" + (f" {self.subject!r}" if self.subject else "")

    @property
    def ran(self) -> int:
        """Number of trials that ran."""
        return sum(tally.ran for tally in self.tallies)

    @property
    def failed(self) -> int:
        """Number of trials that found a fault."""
        return sum(tally.failed for tally in self.tallies)

    @property
    def seconds(self) -> float:
        """Duration of all trials."""
        return sum(tally.seconds for tally in self.tallies)

    def reasons(self, state: Literal["refused", "not run"]) -> dict[str, int]:
        """Count the reasons why trials were refused or not run, the most frequent first."""
        counts: dict[str, int] = {}
        for tally in self.tallies:
            for reason, count in (tally.refused if state == "refused" else tally.not_run).items():
                counts[reason] = counts.get(reason, 0) + count
        # A candidate without any trial has no tally that could state a reason.
        if state == "not run" and not counts and self.state == "not run":
            counts[self.absent or NO_CASE] = 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _state(tallies: Sequence[Tally]) -> State:
    if any(tally.failed for tally in tallies):
        return "wrong"
    if any(tally.passed for tally in tallies):
        return "correct"
    return "refused" if any(tally.refused for tally in tallies) else "not run"
