"""Guesses by prompt lookup: what followed the newest tokens when they last came before."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from interposer_models._engine.sequence import Sequence
from interposer_models._speculation.proposer import Draft, Proposer

_LENGTHS = (3, 2)  # of what is looked up, the one tried first in front


@dataclass(slots=True)
class _Index:
    """The places of n-grams in a sequence.

    Attributes:
        tokens: of the sequence, as far as it is known.
        ends: where each n-gram last ended, without the one at the end of the sequence.
    """

    tokens: list[int]
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0

    def grow(self, sequence: Sequence) -> None:
        """Take in the tokens that the sequence has more."""
        self.tokens += sequence.tokens(len(self.tokens), len(sequence))
        for end in range(self.num_indexed + 1, len(self.tokens)):
            for length in _LENGTHS:
                if end >= length:
                    self.ends[tuple(self.tokens[end - length : end])] = end
        self.num_indexed = len(self.tokens) - 1

    def following(self, count: int) -> tuple[int, ...]:
        """Return up to ``count`` tokens that followed the longest n-gram at the end; or none.

        Where the text between the two places is shorter, it is taken as repeating.
        """
        for length in _LENGTHS:
            start = self.ends.get(tuple(self.tokens[-length:]))
            if start is not None:
                period = self.tokens[start:]
                return tuple(period[place % len(period)] for place in range(count))
        return ()


class NgramProposer(Proposer):
    """Looks up the newest tokens of a sequence in its prompt and output. It computes no model."""

    def __init__(self) -> None:
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, sequences: Items[Sequence], counts: Items[int]) -> list[Draft]:
        """Return what followed before; see ``Proposer``."""
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            index = self._indices.setdefault(sequence, _Index([]))
            index.grow(sequence)
            drafts.append(Draft(index.following(count)))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        """Drop the index of a sequence."""
        self._indices.pop(sequence, None)
