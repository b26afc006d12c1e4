"""The result of a selection: what was chosen, why, and why everything else was not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from interposer._contract.records import Record
from interposer._contract.request import Request
from interposer._contract.verdict import Refusal, Verdict


@dataclass(frozen=True, slots=True)
class Candidate:
    """One possible answer to a request, with the distribution that provides it."""

    name: str
    provider: str
    version: str
    score: float
    record: Record
    judge: Callable[[Request], Verdict]

    def __deepcopy__(self, memo: object) -> Candidate:
        # The record is the plugin's own; ``judge`` reaches its modules.
        return replace(self, record=copy.deepcopy(self.record))

    @property
    def qualified_name(self) -> str:
        """``provider/name``, unique where two distributions use one name."""
        return f"{self.provider}/{self.name}"

    @property
    def origin(self) -> str:
        """Distribution and version, for people."""
        return f"{self.provider} {self.version}"

    @property
    def properties(self) -> frozenset[str]:
        """The promises of the record; empty for kinds of record that promise nothing."""
        promised: frozenset[str] = getattr(self.record, "properties", frozenset())
        return promised

    @property
    def emulation(self) -> str:
        """The way around the arithmetic that the op is meant for; empty for most."""
        text: str = getattr(self.record, "emulation", "")
        return text

    def is_proven_on(self, architecture: str) -> bool:
        """Say whether its author has run it there, as far as the record tells."""
        stated: frozenset[str] | None = getattr(self.record, "proven_on", None)
        return stated is None or architecture in stated


@dataclass(frozen=True, slots=True)
class Measured:
    """The times that candidates took, which the selection takes into account.

    Attributes:
        seconds: by qualified name of the candidate; finite and not negative.
        source: where the figures are from, as a noun: ``"the measurements of this host"``.
        upper: by qualified name, up to where the middle half of the repeats went; what is not
            slower than that of the fastest counts as equally fast.
    """

    seconds: Mapping[str, float]
    source: str
    upper: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, seconds in self.seconds.items():
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} took {seconds!r} seconds, according to {self.source}")


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen candidate for a request.

    Attributes:
        why: the rule of the selection order that decided.
        refusals: every other candidate with its reason, outranked ones included.
        seconds: what the candidates took where that was measured, by qualified name.
        notes: what else a user should know, such as a preference that could not be met.
        wished: a pin or a preference names the chosen one.
        idle: what was chosen is not called at any of its places, as a note says.
        waits: the layers that call it read results on the host between the calls, as a note says.
    """

    request: Request
    chosen: Candidate
    why: str
    refusals: tuple[Refusal, ...]
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()
    wished: bool = False
    idle: bool = False
    waits: bool = False
