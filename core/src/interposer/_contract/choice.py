"""The result of a selection: the chosen candidate, the deciding rule, and all refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from interposer._contract.copying import copied
from interposer._contract.records import Record
from interposer._contract.request import Request
from interposer._contract.verdict import Refusal, Verdict


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel, layer, backend or other object that may serve a request, with its provider."""

    name: str
    provider: str
    version: str
    score: float
    record: Record
    judge: Callable[[Request], Verdict]

    def __deepcopy__(self, memo: object) -> Candidate:
        # Copy the record, which the plugin could change. ``judge`` may refer to modules, which
        # cannot be copied.
        return replace(self, record=copied(self.record))

    @property
    def qualified_name(self) -> str:
        """``provider/name``, unique even if two distributions use the same name."""
        return f"{self.provider}/{self.name}"

    @property
    def origin(self) -> str:
        """Distribution and version, for display."""
        return f"{self.provider} {self.version}"

    @property
    def properties(self) -> frozenset[str]:
        """The properties that the record promises, such as ``graph_safe``; empty for some kinds."""
        promised: frozenset[str] = getattr(self.record, "properties", frozenset())
        return promised

    @property
    def emulation(self) -> str:
        """How the candidate emulates arithmetic that the hardware lacks; usually empty."""
        text: str = getattr(self.record, "emulation", "")
        return text

    def is_proven_on(self, architecture: str) -> bool:
        """Tell whether the record lists ``architecture`` as tested, or lists no architectures."""
        proven_on: frozenset[str] | None = getattr(self.record, "proven_on", None)
        return proven_on is None or architecture in proven_on


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured run times of candidates, for the selection.

    Attributes:
        seconds: by qualified name of the candidate; finite and not negative.
        source: origin of the measurements, as a noun: ``"the measurements of this host"``.
        upper: by qualified name, the third quartile of the repeats. Candidates at or below the
            third quartile of the fastest candidate count as equally fast.
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
    """The result of a selection: the chosen candidate, the reason, and all refusals.

    Attributes:
        why: the rule of the selection order that decided.
        refusals: every other candidate with a reason, including outranked candidates.
        seconds: measured run times of the candidates, by qualified name.
        notes: further facts for the user, such as a preference that could not be met.
        wished: a pin or a preference names the chosen candidate.
        idle: the chosen candidate is never called, as a note explains.
        waits: the calling layers read results on the host between the calls, as a note explains.
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
