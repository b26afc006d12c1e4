"""Interface between an engine's steps and speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from interposer_engine._scheduler import Chunk
from interposer_engine._sequence import Event, TokenSequence


@dataclass(slots=True)
class SpeculationCounts:
    """Numbers of steps and of proposed and accepted draft tokens, over all decode-only steps.

    Attributes:
        plain_steps: Steps without draft tokens.
        drafted_steps: Steps with draft tokens.
        drafted_tokens: Draft tokens that were proposed.
        accepted_tokens: Draft tokens that the model accepted.
    """

    plain_steps: int = 0
    drafted_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance(self) -> float:
        """Fraction of the proposed draft tokens that the target model accepted; 0 if none."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


class StepSpeculation(Protocol):
    """Interface that runs the steps of an engine with speculative decoding."""

    @property
    def figures(self) -> SpeculationCounts:
        """Numbers of steps and of draft tokens so far."""
        ...

    def step(self, chunks: list[Chunk]) -> list[Event]:
        """Compute a step for chunks with allocated pages, and deliver the new tokens.

        See ``Engine.step``.
        """
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """Drop the draft state of a sequence that has ended."""
        ...
