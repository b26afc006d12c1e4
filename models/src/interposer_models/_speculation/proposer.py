"""Interface of a proposer of draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from interposer_models._engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens that may follow a sequence.

    Attributes:
        tokens: The draft tokens.
        probs: ``[S, V]`` for S tokens, in float32 or wider: the distribution that each token was
            drawn from; None if the tokens were chosen without chance.
    """

    tokens: tuple[int, ...] = ()
    probs: Tensor | None = None


class Proposer(ABC):
    """Proposes draft tokens, and may keep state for each sequence until ``forget``."""

    def observe(self, sequence: Sequence, start: int, states: Tensor) -> None:
        """Observe hidden states ``[T, F]`` of accepted tokens at the positions from ``start`` on.

        Called if the model's runner records hidden states. Most proposers need tokens only.
        """
        return None

    @abstractmethod
    def propose(self, sequences: Items[Sequence], counts: Items[int]) -> list[Draft]:
        """Return a draft for each sequence, with at most ``counts[i]`` tokens."""

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended; do nothing for an unknown one."""
