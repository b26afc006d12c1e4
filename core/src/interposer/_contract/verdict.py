"""Answers of everything that may refuse: a verdict with a reason, never a bare bool."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted or refused; a refusal always has a reason.

    ``traceback`` is set where the candidate's own code raised instead of answering.
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
        """Return a positive verdict."""
        return cls(True, reason)

    @classmethod
    def refuse(cls, reason: str, traceback: str = "") -> Verdict:
        """Return a negative verdict with its reason."""
        return cls(False, reason, traceback)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One candidate that was not chosen, who provides it, and why it was refused."""

    candidate: str
    provider: str
    reason: str
    traceback: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.candidate} ({self.provider}): {self.reason}"
