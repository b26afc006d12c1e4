"""The interface of what verifies guessed tokens in the steps of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from interposer_models._engine.scheduler import Chunk
from interposer_models._engine.sequence import Event, Sequence


@dataclass(slots=True)
class SpeculationFigures:
    """The counts of all steps so far that decoded only.

    Attributes:
        plain_steps: without guesses.
        drafted_steps: with some.
        drafted_tokens: that were guessed.
        accepted_tokens: of these, that the model took.
    """

    plain_steps: int = 0
    drafted_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance(self) -> float:
        """The share of guessed tokens that the model took; 0 where none was guessed."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


class StepSpeculation(Protocol):
    """Runs steps in place of the engine, which it calls for all parts of them."""

    @property
    def figures(self) -> SpeculationFigures:
        """The counts so far."""
        ...

    def step(self, chunks: list[Chunk]) -> list[Event]:
        """Compute the chunks of a step, of which the engine has the pages; see ``Engine.step``."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        ...
