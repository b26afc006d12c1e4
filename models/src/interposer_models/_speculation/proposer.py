"""The interface of what guesses the next tokens of sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from interposer_models._engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence.

    Attributes:
        probs: ``[S, V]`` of S tokens, in float32 or wider: the distribution that each was drawn
            from; None where no chance was involved.
    """

    tokens: tuple[int, ...] = ()
    probs: Tensor | None = None


class Proposer(ABC):
    """Guesses tokens; it may keep something of each sequence until that is forgotten."""

    def observe(self, sequence: Sequence, start: int, states: Tensor) -> None:
        """Take hidden states ``[T, F]`` of positions from ``start``, all of tokens that stay.

        Called where the model's runner has them. Most guess by tokens alone.
        """
        return None

    @abstractmethod
    def propose(self, sequences: Items[Sequence], counts: Items[int]) -> list[Draft]:
        """Return the guess for each sequence: any number of tokens up to its count."""

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept of a sequence, which has ended; it may be unknown."""
