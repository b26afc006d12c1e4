"""Steps with speculative decoding: logits for the newest token and for each draft token.

Dimensions: R rows of logits, B sequences, S most draft tokens per sequence, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from interposer_engine._engine import Engine
from interposer_engine._sampling import sampling_batch
from interposer_engine._scheduler import Chunk
from interposer_engine._sequence import Event, TokenSequence
from interposer_engine._speculation.api import SpeculationCounts
from interposer_engine._speculation.proposers import Draft, DraftSampling, Proposer, SavedStates
from interposer_ops.layers.sampler import Sampler, SamplingBatch

_LOSS_FRACTION = 0.01  # fraction of decode time that draft tokens may lose
_MAX_BUDGET_STEPS = 4  # the loss budget is at most the time of this many plain steps
_MIN_PLAIN_STEPS = 3  # plain steps to measure before the first draft tokens
_WINDOW = 9  # measured steps per median
_MAX_RATIO = 2  # a step counts at most this multiple of the median: slower steps were disturbed
_MAX_SKIPPED = 8  # consecutive steps without measurement
_STALE_AFTER = 32  # drafted steps after which plain steps are measured again: sequences grow


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence of a step, with draft tokens and the logits' rows for the sequence."""

    chunk: Chunk
    draft: Draft
    rows: range


class Speculator:
    """Runs an engine's steps, and verifies draft tokens in the decode-only steps.

    Greedy requests get the tokens of greedy decoding. Requests with reproducible noise get the
    tokens that the sampler draws with this noise. Other requests get tokens of
    ``rejection_sample``, from the same distribution. Requests with penalties, edited logits or
    other logit-dependent reports get no draft tokens.

    Attributes:
        figures: Counts of steps and draft tokens.
    """

    def __init__(
        self,
        engine: Engine,
        proposer: Proposer,
        sampling: DraftSampling,
        num_drafts: int,
        cost_model: DraftCostModel | None,
        saved: SavedStates | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the speculative decoding of an engine.

        Args:
            num_drafts: S.
            cost_model: Decides which steps use draft tokens; None for all.
            saved: Copies of recurrent states; None for a model without recurrent states.
            clock: Returns seconds, for the cost model.
        """
        self.figures = SpeculationCounts()
        self._engine = engine
        self._proposer = proposer
        self._sampling = sampling
        self._num_drafts = num_drafts
        self._cost_model = cost_model
        self._saved = saved
        self._clock = clock

    def step(self, chunks: list[Chunk]) -> list[Event]:
        """Compute a step, with draft tokens if the cost model allows; see ``StepSpeculation``."""
        cost_model, count = self._cost_model, len(chunks)
        starts = [chunk.sequence.num_computed for chunk in chunks]
        for chunk in chunks:
            if not self._is_decode(chunk):
                events = self._run(chunks)
                self._observe(chunks, starts)
                return events
        if cost_model is not None and cost_model.skips_measurement():
            events = self._run(chunks)
            self._observe(chunks, starts)
            self.figures.plain_steps += 1
            return events
        rows: list[_Row] = []
        start = drafting_end = self._clock()
        if cost_model is None or cost_model.allows_drafts(count):
            rows = self._propose(chunks)
            drafting_end = self._clock()
        if rows:
            events = self._verify_step(rows)
            self.figures.drafted_steps += 1
            if cost_model is not None:
                verifying_seconds, drafting_seconds = (
                    self._clock() - drafting_end,
                    drafting_end - start,
                )
                cost_model.record_drafted_step(
                    count, verifying_seconds, len(events), drafting_seconds
                )
            return events
        events = self._run(chunks)
        run_end = self._clock()
        self._observe(chunks, starts)
        self.figures.plain_steps += 1
        if cost_model is not None:
            drafting_seconds = drafting_end - start + self._clock() - run_end
            cost_model.record_plain_step(count, run_end - drafting_end, drafting_seconds)
        return events

    def _run(self, chunks: list[Chunk]) -> list[Event]:
        """Compute a step without draft tokens, and deliver the new tokens."""
        engine = self._engine
        sequences, logits = engine.run(chunks)
        return engine.deliver(sequences, *engine.sample(sequences, logits))

    def _observe(self, chunks: list[Chunk], starts: list[int]) -> None:
        """Pass the recorded hidden states of accepted tokens to the proposer.

        Args:
            starts: Positions of the first tokens of the chunks.
        """
        hidden = self._engine.runner.hidden
        if hidden is None or hidden.latest is None:
            return
        row = 0
        for chunk, start in zip(chunks, starts, strict=True):
            sequence = chunk.sequence
            if sequence.finish_reason is None:
                count = min(chunk.num_rows, len(sequence) - 1 - start)
                self._proposer.observe(sequence, start, hidden.latest[row : row + count])
            row += chunk.num_rows

    def forget(self, sequence: TokenSequence) -> None:
        """Drop the proposer's state of a sequence that has ended."""
        self._proposer.forget(sequence)

    def _is_decode(self, chunk: Chunk) -> bool:
        """Return whether a chunk is a decode step: one new token, or recomputed accepted ones."""
        if not chunk.is_last or chunk.num_tokens == 1:
            return chunk.is_last
        sequence = chunk.sequence
        is_restored = self._saved is not None and sequence.num_computed >= len(sequence.prompt)
        return is_restored and chunk.num_tokens <= self._num_drafts + 1

    def _propose(self, chunks: list[Chunk]) -> list[_Row]:
        """Propose draft tokens for which pages are free; return no rows without draft tokens."""
        scheduler = self._engine.scheduler
        budget = scheduler.max_step_tokens - sum(chunk.num_tokens for chunk in chunks)
        sequences, counts = [], []
        for chunk in chunks:
            # After a rejection, states were restored to before this chunk, which is longer than one
            # token. Another rejection would restore them to the same point: do not draft now.
            max_drafts = self._max_drafts(chunk.sequence) if chunk.num_tokens == 1 else 0
            count = min(max_drafts, budget)
            if count > 0:
                sequences.append(chunk.sequence)
                counts.append(count)
                budget -= count
        drafts = dict(zip(sequences, self._proposer.propose(sequences, counts), strict=True))
        if not any(draft.tokens for draft in drafts.values()):
            return []
        rows, start = [], 0
        for chunk in chunks:
            sequence, draft = chunk.sequence, drafts.get(chunk.sequence, Draft())
            # Draft tokens take free pages only, and never preempt another sequence.
            if not scheduler.extend(sequence, len(sequence) + len(draft.tokens)):
                draft = Draft()
            rows.append(
                _Row(
                    Chunk(sequence, chunk.num_tokens, draft.tokens),
                    draft,
                    range(start, start := start + 1 + len(draft.tokens)),
                )
            )
        return rows if start > len(chunks) else []

    def _max_drafts(self, sequence: TokenSequence) -> int:
        """Return how many draft tokens a sequence can use; each step adds one token besides."""
        params = sequence.params
        if not params.takes_logits_alone:
            return 0
        context: int = self._engine.model.config.max_position_embeddings
        num_remaining = min(params.max_new_tokens - len(sequence.output), context - len(sequence))
        return min(self._num_drafts, num_remaining - 1)

    def _verify_step(self, rows: list[_Row]) -> list[Event]:
        engine, scheduler = self._engine, self._engine.scheduler
        chunks = [row.chunk for row in rows]
        # With recurrent states, chunks with draft tokens are counted only after verification.
        final_chunks, starts = chunks, [chunk.sequence.num_computed for chunk in chunks]
        if self._saved is not None:
            final_chunks = [chunk for chunk in chunks if not chunk.drafts]
            slots = [chunk.sequence.state_slot for chunk in chunks if chunk.drafts]
            self._saved.save(engine.runner.states, slots)
        logits = engine.runner.compute(chunks)
        scheduler.advance(final_chunks)
        events: list[Event] = []
        # Verify in groups of sequences, with one call of kernels per method.
        rows_by_verifier: dict[
            Callable[[list[_Row], Tensor], list[list[int]]] | None, list[_Row]
        ] = {}
        for row in rows:
            rows_by_verifier.setdefault(self._verifier(row), []).append(row)
        for verify, verifier_rows in rows_by_verifier.items():
            row_indices = [place for row in verifier_rows for place in row.rows]
            row_logits = logits
            if len(rows_by_verifier) > 1:
                row_logits = logits[torch.tensor(row_indices, device=logits.device)]
            if verify is None:
                sequences = [row.chunk.sequence for row in verifier_rows]
                events += engine.deliver(sequences, *engine.sample(sequences, row_logits))
            else:
                events += self._append_accepted(
                    verifier_rows, verify(verifier_rows, row_logits), row_logits
                )
        self._observe(chunks, starts)
        return events

    def _verifier(self, row: _Row) -> Callable[[list[_Row], Tensor], list[list[int]]] | None:
        """Return the function that verifies a sequence's drafts; None without draft tokens."""
        if not row.draft.tokens:
            return None
        # A custom sampler may not take the argmax, even for greedy requests.
        if row.chunk.sequence.params.takes_likeliest and type(self._engine.sampler) is Sampler:
            return self._verify_greedy
        return (
            self._verify_reproducible
            if is_reproducible(self._engine, row.chunk.sequence)
            else self._verify_sampled
        )

    def _verify_greedy(self, rows: list[_Row], logits: Tensor) -> list[list[int]]:
        return self._token_lists(self._sampling.verify_greedy(*self._draft_tensors(rows), logits))

    def _verify_reproducible(self, rows: list[_Row], logits: Tensor) -> list[list[int]]:
        """Return the tokens that the sampler draws, up to the first that differs from the draft."""
        sampled = self._engine.sampler(logits, self._batch(rows))[0].tolist()
        accepted, start = [], 0
        for row in rows:
            count = 0
            for draft_token in row.draft.tokens:
                if draft_token != sampled[start + count]:
                    break
                count += 1
            accepted.append(sampled[start : start + count + 1])
            start += len(row.rows)
        return accepted

    def _verify_sampled(self, rows: list[_Row], logits: Tensor) -> list[list[int]]:
        probs = None
        if rows[0].draft.probs is not None:
            distributions = [row.draft.probs for row in rows if row.draft.probs is not None]
            # Drafts can be shorter than S: unused entries stay zero.
            probs = distributions[0].new_zeros(len(rows), self._num_drafts, logits.shape[1])
            for index, distribution in enumerate(distributions):
                probs[index, : len(distribution)] = distribution
        drafts, batch = self._draft_tensors(rows), self._batch(rows)
        return self._token_lists(self._sampling.verify(*drafts, logits, batch, probs))

    def _draft_tensors(self, rows: list[_Row]) -> tuple[Tensor, Tensor]:
        """Return all draft tokens as ``[B, S]``, padded with zeros, and the counts as ``[B]``."""
        width = self._num_drafts
        tokens = [[*row.draft.tokens, *[0] * (width - len(row.draft.tokens))] for row in rows]
        counts = [len(row.draft.tokens) for row in rows]
        device = self._engine.device
        return torch.tensor(tokens, device=device), torch.tensor(counts, device=device)

    def _batch(self, rows: list[_Row]) -> SamplingBatch:
        sequences = [row.chunk.sequence for row in rows for _ in row.rows]
        ahead = [index for row in rows for index in range(len(row.rows))]
        engine = self._engine
        return sampling_batch(sequences, engine.model.config.vocab_size, engine.device, ahead)

    @staticmethod
    def _token_lists(tokens: Tensor) -> list[list[int]]:
        return [[token for token in row if token >= 0] for row in tokens.tolist()]

    def _append_accepted(
        self, rows: list[_Row], token_lists: list[list[int]], logits: Tensor
    ) -> list[Event]:
        """Append the accepted tokens of each row to the sequence, until the sequence ends.

        Args:
            token_lists: For each row, the accepted draft tokens and one more token.
        """
        start = 0
        # Select the logits of the appended tokens, to compute log probabilities of these only.
        row_indices: list[int] = []
        for row, tokens in zip(rows, token_lists, strict=True):
            row_indices += range(start, start + len(tokens))
            start += len(row.rows)
        token_ids = torch.tensor([*itertools.chain(*token_lists)], device=logits.device)
        wide_logits = logits[torch.tensor(row_indices, device=logits.device)]
        # Compute log probabilities in at least float32, as the sampler does.
        wide_logits = wide_logits.to(torch.promote_types(wide_logits.dtype, torch.float32))
        chosen = wide_logits.gather(-1, token_ids[:, None]).squeeze(-1)
        logprobs = iter((chosen - wide_logits.logsumexp(-1)).tolist())
        events = []
        restored_slots = []
        for row, tokens in zip(rows, token_lists, strict=True):
            self.figures.drafted_tokens += len(row.draft.tokens)
            self.figures.accepted_tokens += len(tokens) - 1
            sequence = row.chunk.sequence
            for token, logprob in zip(tokens, itertools.islice(logprobs, len(tokens)), strict=True):
                if sequence.finish_reason is None:
                    events.append(self._engine.append(sequence, token, logprob))
            if sequence.finish_reason is not None:
                continue
            if self._saved is not None:
                if len(tokens) <= len(row.draft.tokens):
                    restored_slots.append(sequence.state_slot)
                    continue
                self._engine.scheduler.advance([row.chunk])
            self._engine.scheduler.accept(row.chunk, len(tokens) - 1)
        if self._saved is not None:
            self._saved.restore(self._engine.runner.states, restored_slots)
        return events


def is_reproducible(engine: Engine, sequence: TokenSequence) -> bool:
    """Return whether a sequence must get exactly the tokens that the sampler would draw.

    A seed promises that. A sampler of another class may promise the same, and is treated alike.
    """
    seeded = sequence.params.seed is not None or engine.has_fixed_seed
    return seeded or type(engine.sampler) is not Sampler


@dataclass(slots=True)
class _BatchSize:
    """Measured durations of decode steps with about the same number of sequences.

    Attributes:
        plain: Seconds of the last steps without draft tokens, except those right after a drafted
            step.
        drafted: Seconds of the last steps that verified draft tokens, without drafting.
        num_drafted: Number of drafted steps since the last plain one.
        median_plain: Median of ``plain``.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    num_drafted: int = 0
    median_plain: float = 0.0


class DraftCostModel:
    """Decides which steps use draft tokens, so that drafting loses at most 1% of decode time.

    A plain step gives each sequence one token. A drafted step costs its duration. It saves the
    seconds in which plain steps produce as many tokens: tokens per sequence, times the median of
    the last plain steps with about as many sequences (equal bit length of the number). A plain step
    right after a drafted step finds less of the model in the processor's caches: the extra time
    counts as a loss of the draft tokens, and not in the median. A step counts at most twice the
    median of its kind, because slower steps waited for something else.

    The next step uses draft tokens if the loss budget is not negative. The budget grows by 1% of
    the time of all decode steps and by savings, and is at most the time of 4 plain steps. So the
    loss of any period is bounded. The first drafted step of each batch size is not counted, because
    kernels are compiled. While draft tokens pause, only every ninth step is measured, because
    measuring takes time; the others count as typical.
    """

    def __init__(self, agreed: Callable[[bool], bool] = bool) -> None:
        """Start with a loss budget of zero.

        Args:
            agreed: ``Engine.agree``: makes all ranks follow the clock of one.
        """
        self._agreed = agreed
        self._budget = 0.0
        self._batch_sizes: dict[int, _BatchSize] = {}
        self._is_after_drafted = False
        self._num_skips = 0

    def skips_measurement(self) -> bool:
        """Return whether the next step runs without draft tokens and without a measurement."""
        is_skipped = self._num_skips > 0
        self._num_skips -= is_skipped
        return self._agreed(is_skipped)

    def allows_drafts(self, num_sequences: int) -> bool:
        """Return whether the next step may use draft tokens, by the measured costs."""
        size = self._size(num_sequences)
        is_measured = len(size.plain) >= _MIN_PLAIN_STEPS and size.num_drafted < _STALE_AFTER
        return self._agreed(is_measured and self._budget >= 0)

    def record_plain_step(
        self, num_sequences: int, seconds: float, drafting_seconds: float
    ) -> None:
        """Record the duration of a decode step without draft tokens.

        Args:
            drafting_seconds: Time spent on drafting without a result, in addition to ``seconds``.
        """
        size = self._size(num_sequences)
        is_after_drafted, self._is_after_drafted = self._is_after_drafted, False
        lost_seconds = drafting_seconds
        # The drafted step before evicted model weights from caches: charge the slowdown to
        # drafting.
        if is_after_drafted and size.plain:
            lost_seconds += min(seconds, _MAX_RATIO * size.median_plain) - size.median_plain
        else:
            size.plain.append(seconds)
            size.median_plain = _median(size.plain)
            size.num_drafted = 0
        self._update_budget(size, seconds + drafting_seconds, lost_seconds)
        # Skip as many measurements as it takes to earn the budget back.
        if self._budget < 0 and size.median_plain > 0:
            earned_seconds = _LOSS_FRACTION * size.median_plain
            self._num_skips = min(int(-self._budget / earned_seconds), _MAX_SKIPPED)
            self._budget += earned_seconds * self._num_skips

    def record_drafted_step(
        self, num_sequences: int, seconds: float, num_tokens: int, drafting_seconds: float
    ) -> None:
        """Record the duration of a step that verified draft tokens and added ``num_tokens`` tokens.

        Args:
            seconds: Time of the step without drafting.
        """
        size, self._is_after_drafted = self._size(num_sequences), True
        size.num_drafted += 1
        # The first drafted step of a size compiles kernels: measure it, but do not charge it.
        is_warm = len(size.drafted) > 0
        size.drafted.append(seconds)
        if is_warm:
            seconds = min(seconds, _MAX_RATIO * _median(size.drafted)) + drafting_seconds
            gained_seconds = size.median_plain * num_tokens / num_sequences
            self._update_budget(size, seconds, seconds - gained_seconds)

    def _update_budget(self, size: _BatchSize, seconds: float, lost_seconds: float) -> None:
        self._budget = min(
            self._budget + _LOSS_FRACTION * seconds - lost_seconds,
            _MAX_BUDGET_STEPS * size.median_plain,
        )

    def _size(self, num_sequences: int) -> _BatchSize:
        bit_length = num_sequences.bit_length()
        size = self._batch_sizes.get(bit_length)
        if size is None:
            size = self._batch_sizes[bit_length] = _BatchSize()
        return size


def _median(seconds: Collection[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]
