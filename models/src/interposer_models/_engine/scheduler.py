"""Continuous batching: the choice of the sequences and tokens of the next step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from interposer_models._engine.pages import PagePool
from interposer_models._engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``num_tokens`` uncomputed tokens of a sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Return True if the step ends with the sequence's newest token, so that one is sampled."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence)


class Scheduler:
    """Keeps the running sequences going and lets waiting ones join, first come, first served.

    A decode step and a piece of a prompt are the same thing here: the next uncomputed tokens of
    a sequence. When pages run out, the sequence that joined last gives its pages back and is
    computed again later.
    """

    def __init__(self, pool: PagePool, max_sequences: int, max_step_tokens: int) -> None:
        self.pool = pool
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Say whether any sequence is running or waiting."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it stands, and take its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def next_step(self) -> list[Chunk]:
        """Return the chunks of the next step, with pages for all of them; empty when idle."""
        while self.waiting and len(self.running) < self.max_sequences:
            joining = self.waiting.popleft()
            joining.state_slot = self.pool.take_slot()
            self.running.append(joining)
        budget = self.max_step_tokens
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence not in self.running:
                continue  # gave its pages to an older one just now
            wanted = min(len(sequence) - sequence.num_computed, budget)
            if self._reserve(sequence, sequence.num_computed + wanted):
                chunks.append(Chunk(sequence, wanted))
                budget -= wanted
        return chunks

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for ``num_tokens`` tokens, at the cost of sequences that joined later."""
        while not self.pool.extend(sequence.pages, num_tokens):
            youngest = self.running.pop()
            self._release(youngest)
            youngest.num_computed = 0
            self.waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True

    def _release(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds."""
        self.pool.release(sequence.pages)
        self.pool.return_slot(sequence.state_slot)
        sequence.state_slot = -1
