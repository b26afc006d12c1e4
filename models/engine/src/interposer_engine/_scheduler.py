"""Continuous batching: the choice of the sequences and tokens of the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from interposer.errors import ContextLengthError
from interposer_engine._encoder_pages import EncoderPagePool
from interposer_engine._pages import PagePool
from interposer_engine._prefix_cache import SharedPrefixes
from interposer_engine._prompt_runs import Run
from interposer_engine._sequence import TokenSequence

# Rows of logits per step for prompt log probabilities: 75 MiB with a vocabulary of 150,000.
_MAX_PROMPT_LOGITS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``num_tokens`` uncomputed tokens of a sequence.

    Attributes:
        sequence: The sequence.
        num_tokens: Number of tokens to compute.
        drafts: Draft tokens that follow the newest token and are computed in the same step.
        num_prompt_logits: Number of last tokens, not counting the newest one, with requested logits
            for prompt log probabilities.
    """

    sequence: TokenSequence
    num_tokens: int
    drafts: tuple[int, ...] = ()
    num_prompt_logits: int = 0

    @property
    def num_rows(self) -> int:
        """Number of tokens that the step computes for the chunk."""
        return self.num_tokens + len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Number of the chunk's last tokens for which logits are requested."""
        return self.num_prompt_logits + (1 + len(self.drafts) if self.is_last else 0)

    @property
    def is_last(self) -> bool:
        """Whether the chunk ends with the newest token, so that the step samples a new token."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence)


class Scheduler:
    """Schedules running sequences and admits waiting ones, first come, first served.

    Decode steps and prompt chunks are treated alike: both are the next uncomputed tokens of a
    sequence. When the pool has no free pages, the sequence that joined last is preempted: the pages
    are freed, and the tokens are computed again later.

    Args:
        pools: Page pools; the first one also hands out state slots.
        encoder_pool: Page pool of the encoder inputs, if the model has an encoder.
        whole_prompts: Whether a prompt must be computed in one step, because prompt tokens attend
            in both directions. A prompt that does not fit after older sequences has priority in the
            next step; the older sequences have priority in the step after that.
        prefixes: The prefix cache. A sequence waits while an older one computes a prefix of the
            sequence.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        max_sequences: int,
        max_step_tokens: int,
        encoder_pool: EncoderPagePool | None = None,
        whole_prompts: bool = False,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self.pools = pools
        self.encoder_pool = encoder_pool
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
        self._windowed = [
            (number, pool) for number, pool in enumerate(pools) if pool.seen_tokens is not None
        ]
        self._prefixes = prefixes
        self._whole_prompts = whole_prompts
        self._delayed: TokenSequence | None = None

    @property
    def busy(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self.running or self.waiting)

    def check(self, num_tokens: int, runs: Sequence[Run] = ()) -> None:
        """Raise RequestError if tokens that must be computed in one step exceed every step.

        Args:
            num_tokens: Length of the prompt.
            runs: Encoded runs of the prompt.
        """
        if self._whole_prompts:
            self._check_step("prompt", 0, num_tokens)
        else:
            for run in runs:
                if run.input.attends_both_ways:
                    self._check_step(run.input.kind, run.start, len(run.input))

    def _check_step(self, name: str, start: int, num_tokens: int) -> None:
        """Raise RequestError if no step can compute ``num_tokens`` tokens from ``start`` on."""
        cache_capacity = min(
            (pool.step_capacity(start, pool.num_pages) for _, pool in self._windowed),
            default=num_tokens,
        )
        for capacity, setting in (
            (self.max_step_tokens, "max_step_tokens"),
            (cache_capacity, "cache_tokens"),
        ):
            if num_tokens > capacity:
                raise ContextLengthError(
                    f"The {name} has {num_tokens} tokens, which see each other in both directions "
                    f"and are computed in one step. The largest step takes {capacity}. "
                    f"Try: load(..., {setting}={num_tokens}), or a {name} of at most {capacity}"
                )

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence to be admitted by a later step."""
        self.waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a running or waiting sequence, and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence is self._delayed:
            self._delayed = None
        self._release(sequence)

    def next_step(self) -> list[Chunk]:
        """Return the chunks of the next step, with reserved pages; empty when idle."""
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting.popleft()
            sequence.state_slot = self.pools[0].take_slot()
            self.running.append(sequence)
            if self._prefixes is not None:
                self._prefixes.plan_checkpoints(sequence, self.running)
        budget = encoder_budget = self.max_step_tokens
        prompt_logits_budget = _MAX_PROMPT_LOGITS
        chunks: list[Chunk] = []
        # Reserve capacity for a whole prompt that did not fit into the last step.
        delayed, self._delayed = self._delayed, None
        reserved_tokens = 0 if delayed is None else self._min_chunk_tokens(delayed)
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence not in self.running:
                continue  # was preempted by an older sequence in this step
            if sequence is delayed:
                # The reservation is for this sequence: from here on the whole budget is free.
                reserved_tokens = 0
            if (
                self._prefixes is not None
                and not sequence.pages[0]
                and not self._prefixes.attach(sequence, self.running)
            ):
                continue
            if self.encoder_pool is not None and not sequence.num_computed:
                # The whole encoder input is encoded before the first chunk, within step memory.
                num_encoded = (
                    0 if self.encoder_pool.is_encoded(sequence.source_key) else len(sequence.source)
                )
                if num_encoded > encoder_budget:
                    continue
                encoder_budget -= num_encoded
            num_tokens = min(self._pending_tokens(sequence), budget - reserved_tokens)
            for _, pool in self._windowed:
                # A small pool computes a long chunk in parts, and frees pages in between.
                num_tokens = min(
                    num_tokens, pool.step_capacity(sequence.num_computed, pool.num_pages)
                )
            wants_logprobs = sequence.params.prompt_logprobs is not None
            if wants_logprobs:
                num_tokens = min(num_tokens, _limit_prompt_logits(sequence, prompt_logits_budget))
            if self._prefixes is not None:
                num_tokens = self._prefixes.limit_chunk(sequence, num_tokens)
            if num_tokens < self._min_chunk_tokens(sequence):
                if self._delayed is None:
                    self._delayed = sequence
                continue
            if self._reserve(sequence, sequence.num_computed + num_tokens):
                num_prompt_logits = (
                    _num_prompt_logits(sequence, num_tokens) if wants_logprobs else 0
                )
                chunks.append(Chunk(sequence, num_tokens, num_prompt_logits=num_prompt_logits))
                budget -= num_tokens
                prompt_logits_budget -= num_prompt_logits
        return chunks

    def next_alone(self, sequence: TokenSequence, most_tokens: int | None = None) -> Chunk | None:
        """Return the next chunk of a sequence that is not queued, limited by the free pages.

        Returns None if the free pages hold no token, or less than a prompt that must be computed in
        one step. ``remove`` frees the pages.
        """
        num_tokens = self._pending_tokens(sequence)
        if most_tokens is not None:
            num_tokens = min(num_tokens, most_tokens)
        for pool_index, pool in self._windowed:
            # Zero pages in the list take no memory of the pool.
            num_zero_pages = sequence.pages[pool_index].count(pool.zero_page)
            num_held_pages = len(sequence.pages[pool_index]) - num_zero_pages
            num_tokens = min(
                num_tokens,
                pool.step_capacity(sequence.num_computed, num_held_pages + pool.num_free),
            )
        min_tokens = self._min_chunk_tokens(sequence)
        if num_tokens < min_tokens or not self.extend(sequence, sequence.num_computed + num_tokens):
            return None
        return Chunk(sequence, num_tokens)

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """Count the tokens of the chunks as computed, and free pages that have left a window."""
        # Fast path: without windows and prefix cache, no page can be freed or registered.
        if self._prefixes is None and not self._windowed:
            for chunk in chunks:
                chunk.sequence.num_computed += chunk.num_tokens
            return
        for chunk in chunks:
            self._advance(chunk, has_drafts=bool(chunk.drafts))

    def accept(self, chunk: Chunk, num_drafts: int) -> None:
        """Count a chunk's first ``num_drafts`` draft tokens as computed; free pages of the rest.

        The sequence contains the accepted tokens already.
        """
        sequence = chunk.sequence
        self._advance(Chunk(sequence, num_drafts), has_drafts=True)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.shrink(pages, sequence.num_computed + 1)

    def _advance(self, chunk: Chunk, has_drafts: bool) -> None:
        sequence, first = chunk.sequence, chunk.sequence.num_computed
        sequence.num_computed += chunk.num_tokens
        if self._prefixes is not None:
            sequence.state_tokens = -1 if has_drafts else sequence.num_computed
            self._prefixes.register_computed(sequence, first)
        for pool_index, pool in self._windowed:
            pool.trim(sequence.pages[pool_index], sequence.num_computed)

    def _pending_tokens(self, sequence: TokenSequence) -> int:
        """Return how many uncomputed tokens can be in one chunk.

        A run whose tokens attend in both directions is a chunk of its own.
        """
        # Fast path: most sequences have no runs.
        run = sequence.next_mutual_run if sequence.runs and not self._whole_prompts else None
        if run is None:
            return len(sequence) - sequence.num_computed
        is_started = run.start <= sequence.num_computed
        return (run.stop if is_started else run.start) - sequence.num_computed

    def _min_chunk_tokens(self, sequence: TokenSequence) -> int:
        if self._whole_prompts:
            return max(len(sequence.prompt) - sequence.num_computed, 1)
        run = sequence.next_mutual_run if sequence.runs else None
        if run is None or run.start > sequence.num_computed:
            return 1
        return run.stop - sequence.num_computed

    def _reserve(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Allocate pages for ``num_tokens`` tokens, preempting younger sequences if necessary.

        Returns False if the sequence itself was preempted.
        """
        # The youngest running sequence is preempted, which may be this one.
        while not self.extend(sequence, num_tokens):
            youngest = self.running.pop()
            self._release(youngest)
            youngest.num_computed = 0
            self.waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True

    def extend(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Allocate pages for ``num_tokens`` tokens in all pools; return False if any pool is full.

        After a failure the pages of some pools stay allocated to the sequence.
        """
        if self.encoder_pool is not None and sequence.encoded is None:
            sequence.encoded = self.encoder_pool.attach(sequence.source_key, len(sequence.source))
            if sequence.encoded is None:
                return False
        pairs = zip(self.pools, sequence.pages, strict=True)
        return all(pool.extend(pages, num_tokens) for pool, pages in pairs)

    def _release(self, sequence: TokenSequence) -> None:
        """Free all pages and the state slot of a sequence."""
        if self._prefixes is not None:
            self._prefixes.detach(sequence)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.release(pages)
        if self.encoder_pool is not None and sequence.encoded is not None:
            self.encoder_pool.detach(sequence.encoded)
            sequence.encoded = None
        self.pools[0].return_slot(sequence.state_slot)
        sequence.state_slot = -1


def _limit_prompt_logits(sequence: TokenSequence, limit: int) -> int:
    """Return how many tokens to compute, so that at most ``limit`` rows of prompt logits result."""
    if sequence.num_missing_logprobs <= limit:
        return len(sequence) - sequence.num_computed
    return len(sequence.prompt_logprobs) - sequence.num_computed + limit


def _num_prompt_logits(sequence: TokenSequence, num_tokens: int) -> int:
    num_computed_logprobs = len(sequence.prompt_logprobs) - sequence.num_computed
    return max(0, min(num_tokens - num_computed_logprobs, sequence.num_missing_logprobs))
