"""Continuous batching: the choice of the sequences and tokens of the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from interposer.errors import RequestError
from interposer_models._engine.pages import PagePool
from interposer_models._engine.sequence import Sequence
from interposer_models._engine.shared_prefixes import SharedPrefixes

# Of a step, besides the newest tokens: as many logits as a vocabulary of 150,000 has in 75 MiB.
_MOST_TOLD = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``num_tokens`` uncomputed tokens of a sequence.

    Attributes:
        drafts: tokens that somebody guessed to follow the newest one, computed along.
        num_told: tokens before the newest one whose logits are wanted; they are the last ones.
    """

    sequence: Sequence
    num_tokens: int
    drafts: tuple[int, ...] = ()
    num_told: int = 0

    @property
    def num_rows(self) -> int:
        """The tokens that the step computes."""
        return self.num_tokens + len(self.drafts)

    @property
    def num_logits(self) -> int:
        """The last tokens of these whose logits are wanted."""
        return self.num_told + (1 + len(self.drafts) if self.is_last else 0)

    @property
    def is_last(self) -> bool:
        """Return True if the step ends with the sequence's newest token, so that one is sampled."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence)


class Scheduler:
    """Keeps the running sequences going and lets waiting ones join, first come, first served.

    A decode step and a piece of a prompt are the same thing here: the next uncomputed tokens of
    a sequence. When pages run out, the sequence that joined last gives its pages back and is
    computed again later.

    Args:
        pools: of pages, the first one with the rows of states.
        sources: the pool of sources, where sequences have one.
        whole_prompts: a prompt is computed in one step, as its tokens see each other in both
            directions. One that finds no room behind older sequences goes before them in the next
            step, and they before it in the one after.
        prefixes: shares what sequences with equal beginnings compute. One waits while an older one
            computes what it needs.
    """

    def __init__(
        self,
        pools: Items[PagePool],
        max_sequences: int,
        max_step_tokens: int,
        sources: PagePool | None = None,
        whole_prompts: bool = False,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self.pools = pools
        self.sources = sources
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._windowed = [
            (number, pool) for number, pool in enumerate(pools) if pool.seen_tokens is not None
        ]
        self._prefixes = prefixes
        self._whole_prompts = whole_prompts
        self._delayed: Sequence | None = None

    @property
    def busy(self) -> bool:
        """Say whether any sequence is running or waiting."""
        return bool(self.running or self.waiting)

    def check(self, num_tokens: int) -> None:
        """Raise RequestError if no step takes a prompt of so many tokens that has to be whole."""
        if not self._whole_prompts:
            return
        held = min((pool.room(0, pool.num_pages) for _, pool in self._windowed), default=num_tokens)
        for most, setting in ((self.max_step_tokens, "max_step_tokens"), (held, "cache_tokens")):
            if num_tokens > most:
                raise RequestError(
                    f"The prompt has {num_tokens} tokens, which see each other in both directions "
                    f"and are computed in one step. The largest one takes {most}. "
                    f"Try: load(..., {setting}={num_tokens}), or shorten it to {most}"
                )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it stands, and take its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence is self._delayed:
            self._delayed = None
        self._release(sequence)

    def next_step(self) -> list[Chunk]:
        """Return the chunks of the next step, with pages for all of them; empty when idle."""
        while self.waiting and len(self.running) < self.max_sequences:
            joining = self.waiting.popleft()
            joining.state_slot = self.pools[0].take_slot()
            self.running.append(joining)
            if self._prefixes is not None:
                self._prefixes.expect(joining, self.running)
        budget = source_budget = self.max_step_tokens
        left_told = _MOST_TOLD
        chunks: list[Chunk] = []
        delayed, self._delayed = self._delayed, None
        kept = 0 if delayed is None else self._least(delayed)
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence not in self.running:
                continue  # gave its pages to an older one just now
            if sequence is delayed:
                kept = 0
            if (
                self._prefixes is not None
                and not sequence.pages[0]
                and not self._prefixes.join(sequence, self.running)
            ):
                continue
            if self.sources is not None and not sequence.num_computed:
                # It is encoded before its first chunk, whole, and in memory for such a step.
                if len(sequence.source) > source_budget:
                    continue
                source_budget -= len(sequence.source)
            wanted = min(len(sequence) - sequence.num_computed, budget - kept)
            for _, pool in self._windowed:
                # A small pool takes a long chunk in parts, between which pages come back.
                wanted = min(wanted, pool.room(sequence.num_computed, pool.num_pages))
            is_told = sequence.params.prompt_logprobs is not None
            if is_told:
                wanted = min(wanted, _until_told(sequence, left_told))
            if self._prefixes is not None:
                wanted = self._prefixes.cut(sequence, wanted)
            if wanted < self._least(sequence):
                if self._delayed is None:
                    self._delayed = sequence
                continue
            if self._reserve(sequence, sequence.num_computed + wanted):
                told = _num_told(sequence, wanted) if is_told else 0
                chunks.append(Chunk(sequence, wanted, num_told=told))
                budget -= wanted
                left_told -= told
        return chunks

    def next_alone(self, sequence: Sequence, most_tokens: int | None = None) -> Chunk | None:
        """Return the next chunk of a sequence that nobody queued, as long as free pages allow.

        None where they do not allow for a token, or for a prompt that has to be whole. ``remove``
        takes the pages back.
        """
        wanted = len(sequence) - sequence.num_computed
        if most_tokens is not None:
            wanted = min(wanted, most_tokens)
        for number, pool in self._windowed:
            unseen = sequence.pages[number].count(pool.zero_page)
            held = len(sequence.pages[number]) - unseen
            wanted = min(wanted, pool.room(sequence.num_computed, held + pool.num_free))
        least = self._least(sequence)
        if wanted < least or not self.extend(sequence, sequence.num_computed + wanted):
            return None
        return Chunk(sequence, wanted)

    def advance(self, chunks: Items[Chunk]) -> None:
        """Count the tokens of chunks as computed, and take back the pages that none sees now."""
        if self._prefixes is None and not self._windowed:
            for chunk in chunks:
                chunk.sequence.num_computed += chunk.num_tokens
            return
        for chunk in chunks:
            self._advance(chunk, has_guesses=bool(chunk.drafts))

    def accept(self, chunk: Chunk, num_drafts: int) -> None:
        """Count the first drafts of a chunk as computed, and take back pages of the others.

        The sequence has these tokens already.
        """
        sequence = chunk.sequence
        self._advance(Chunk(sequence, num_drafts), has_guesses=True)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.shrink(pages, sequence.num_computed + 1)

    def _advance(self, chunk: Chunk, has_guesses: bool) -> None:
        sequence, first = chunk.sequence, chunk.sequence.num_computed
        sequence.num_computed += chunk.num_tokens
        if self._prefixes is not None:
            sequence.state_tokens = -1 if has_guesses else sequence.num_computed
            self._prefixes.learn(sequence, first)
        for number, pool in self._windowed:
            pool.trim(sequence.pages[number], sequence.num_computed)

    def _least(self, sequence: Sequence) -> int:
        """Return how many tokens the next chunk of a sequence has at least."""
        return max(len(sequence.prompt) - sequence.num_computed, 1) if self._whole_prompts else 1

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for ``num_tokens`` tokens, at the cost of sequences that joined later."""
        while not self.extend(sequence, num_tokens):
            youngest = self.running.pop()
            self._release(youngest)
            youngest.num_computed = 0
            self.waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take pages for ``num_tokens`` tokens from all pools, or say False with those of some."""
        if self.sources is not None and not self.sources.extend(
            sequence.source_pages, len(sequence.source)
        ):
            return False
        pairs = zip(self.pools, sequence.pages, strict=True)
        return all(pool.extend(pages, num_tokens) for pool, pages in pairs)

    def _release(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds."""
        if self._prefixes is not None:
            self._prefixes.leave(sequence)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.release(pages)
        if self.sources is not None:
            self.sources.release(sequence.source_pages)
        self.pools[0].return_slot(sequence.state_slot)
        sequence.state_slot = -1


def _until_told(sequence: Sequence, most: int) -> int:
    """Return after how many tokens so many more of the prompt are told; all if they are fewer."""
    if sequence.num_untold <= most:
        return len(sequence) - sequence.num_computed
    return len(sequence.prompt_logprobs) - sequence.num_computed + most


def _num_told(sequence: Sequence, num_tokens: int) -> int:
    """Return of how many of the next tokens logits are wanted, for what a prompt is told."""
    known = len(sequence.prompt_logprobs) - sequence.num_computed
    return max(0, min(num_tokens - known, sequence.num_untold))
