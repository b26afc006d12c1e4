"""Draft tokens by prompt lookup: the tokens that followed the last occurrence of an n-gram."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from interposer_models._engine.sequence import Sequence
from interposer_models._speculation.proposer import Draft, Proposer

_LENGTHS = (3, 2)  # n-gram lengths in the order in which they are tried


@dataclass(slots=True)
class _Index:
    """Positions of the n-grams of a sequence.

    Attributes:
        tokens: Tokens of the sequence that were indexed so far, and the newest one.
        ends: End of the last occurrence of each n-gram, without the one at the end of the sequence.
        num_indexed: Number of tokens with indexed n-grams.
    """

    tokens: list[int]
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0

    def grow(self, sequence: Sequence) -> None:
        """Index the tokens that were appended to the sequence."""
        self.tokens += sequence.tokens(len(self.tokens), len(sequence))
        for end in range(self.num_indexed + 1, len(self.tokens)):
            for length in _LENGTHS:
                if end >= length:
                    self.ends[tuple(self.tokens[end - length : end])] = end
        # The n-gram at the end is the one to look up, so it is indexed with the next token.
        self.num_indexed = len(self.tokens) - 1

    def following(self, count: int) -> tuple[int, ...]:
        """Return ``count`` tokens that followed the longest known n-gram; () without one.

        If fewer tokens followed, the tokens are repeated.
        """
        for length in _LENGTHS:
            start = self.ends.get(tuple(self.tokens[-length:]))
            if start is not None:
                period = self.tokens[start:]
                return tuple(period[place % len(period)] for place in range(count))
        return ()


class NgramProposer(Proposer):
    """Looks up the newest tokens of a sequence in the earlier tokens, without a model."""

    def __init__(self) -> None:
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, sequences: Items[Sequence], counts: Items[int]) -> list[Draft]:
        """Return the tokens that followed the newest n-gram before; see ``Proposer``."""
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            index = self._indices.setdefault(sequence, _Index([]))
            index.grow(sequence)
            drafts.append(Draft(index.following(count)))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        """Drop the index of a sequence."""
        self._indices.pop(sequence, None)
