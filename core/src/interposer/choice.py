"""The result of a selection: what was chosen, why, and why everything else was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from interposer.records import Record
from interposer.request import Request
from interposer.verdict import Refusal, Verdict

__all__ = ["Candidate", "Choice"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One possible answer to a request, with the distribution that provides it."""

    name: str
    provider: str
    version: str
    score: float
    record: Record
    judge: Callable[[Request], Verdict]

    @property
    def qualified_name(self) -> str:
        """``provider/name``, unique where two distributions use one name."""
        return f"{self.provider}/{self.name}"

    @property
    def origin(self) -> str:
        """Distribution and version, for people."""
        return f"{self.provider} {self.version}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen candidate for a request.

    Attributes:
        why: the rule of the selection order that decided.
        refusals: every other candidate with its reason, outranked ones included.
    """

    request: Request
    chosen: Candidate
    why: str
    refusals: tuple[Refusal, ...]
