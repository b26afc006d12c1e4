"""The answer of every check that may refuse: a verdict with a reason, never a bare bool."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Verdict:
    """Acceptance or refusal; a refusal always has a reason.

    ``traceback`` is set if the candidate's own code raised instead of answering.
    """

    accepted: bool
    reason: str = ""
    traceback: str = ""

    def __post_init__(self) -> None:
        if not self.accepted and not self.reason:
            raise ValueError("a refusal needs a reason")

    def __bool__(self) -> bool:
        return self.accepted

    @classmethod
    def accept(cls, reason: str = "") -> Verdict:
        """Return a verdict that accepts."""
        return cls(True, reason)

    @classmethod
    def refuse(cls, reason: str, traceback: str = "") -> Verdict:
        """Return a verdict that refuses, with the reason."""
        return cls(False, reason, traceback)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One candidate that was not chosen, with provider and reason."""

    candidate: str
    provider: str
    reason: str
    traceback: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.candidate} ({self.provider}): {self.reason}"
