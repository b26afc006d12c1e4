"""The steps of an engine that verifies guesses: rows of logits for the newest token and each guess.

Dimensions: R rows of logits, B sequences, S guessed tokens at most, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from interposer_models._engine.engine import Engine
from interposer_models._engine.request_batch import sampling_batch
from interposer_models._engine.scheduler import Chunk
from interposer_models._engine.sequence import Event, Sequence
from interposer_models._engine.speculation import SpeculationFigures
from interposer_models._speculation.balance import Balance
from interposer_models._speculation.draft_sampling import DraftSampling
from interposer_models._speculation.kept_states import KeptStates
from interposer_models._speculation.proposer import Draft, Proposer
from interposer_ops.layers.sampler import Sampler, SamplingBatch


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence of the step, its draft tokens and its rows of the logits."""

    chunk: Chunk
    draft: Draft
    rows: range


class Speculator:
    """Runs the steps of an engine, and verifies guesses in those that decode only.

    A greedy request takes what greedy decoding takes, one that repeats its noise what it draws by
    that, and others what ``rejection_sample`` draws from the same distribution. Requests of which
    more than the model's logits decides are never guessed for.

    Attributes:
        figures: how many guesses were accepted.
    """

    def __init__(
        self,
        engine: Engine,
        proposer: Proposer,
        sampling: DraftSampling,
        num_drafts: int,
        balance: Balance | None,
        kept: KeptStates | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Guess nothing yet.

        Args:
            num_drafts: S.
            balance: says which steps are with guesses; None makes all so.
            kept: states before guesses; None where the model has none.
            clock: returns seconds, by which ``balance`` measures steps.
        """
        self.figures = SpeculationFigures()
        self._engine = engine
        self._proposer = proposer
        self._sampling = sampling
        self._num_drafts = num_drafts
        self._balance = balance
        self._kept = kept
        self._clock = clock

    def step(self, chunks: list[Chunk]) -> list[Event]:
        """Compute a step, with guesses where they pay; see ``StepSpeculation``."""
        balance, count = self._balance, len(chunks)
        starts = [chunk.sequence.num_computed for chunk in chunks]
        for chunk in chunks:
            if not self._decodes(chunk):
                events = self._engine.run(chunks)
                self._observe(chunks, starts)
                return events
        if balance is not None and balance.rests():
            events = self._engine.run(chunks)
            self._observe(chunks, starts)
            self.figures.plain_steps += 1
            return events
        rows: list[_Row] = []
        start = drafted = self._clock()
        if balance is None or balance.allows(count):
            rows = self._drafted(chunks)
            drafted = self._clock()
        if rows:
            events = self._verified(rows)
            self.figures.drafted_steps += 1
            if balance is not None:
                verifying, guessing = self._clock() - drafted, drafted - start
                balance.count_drafted(count, verifying, len(events), guessing)
            return events
        events = self._engine.run(chunks)
        ran = self._clock()
        self._observe(chunks, starts)
        self.figures.plain_steps += 1
        if balance is not None:
            guessing = drafted - start + self._clock() - ran
            balance.count_plain(count, ran - drafted, guessing)
        return events

    def _observe(self, chunks: list[Chunk], starts: list[int]) -> None:
        """Hand out the hidden states of the tokens of a step that stay, where there are some.

        Args:
            starts: positions of the first tokens of the chunks.
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

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._proposer.forget(sequence)

    def _decodes(self, chunk: Chunk) -> bool:
        """Say whether a chunk is the newest token, behind those whose states were taken back."""
        if not chunk.is_last or chunk.num_tokens == 1:
            return chunk.is_last
        sequence = chunk.sequence
        returned = self._kept is not None and sequence.num_computed >= len(sequence.prompt)
        return returned and chunk.num_tokens <= self._num_drafts + 1

    def _drafted(self, chunks: list[Chunk]) -> list[_Row]:
        """Return the chunks with guesses that pages are there for; none where there is no guess."""
        scheduler = self._engine.scheduler
        budget = scheduler.max_step_tokens - sum(chunk.num_tokens for chunk in chunks)
        asked, counts = [], []
        for chunk in chunks:
            # States were taken back to before this chunk; they would stay there by another guess.
            room = self._room(chunk.sequence) if chunk.num_tokens == 1 else 0
            count = min(room, budget)
            if count > 0:
                asked.append(chunk.sequence)
                counts.append(count)
                budget -= count
        drafts = dict(zip(asked, self._proposer.propose(asked, counts), strict=True))
        if not any(draft.tokens for draft in drafts.values()):
            return []
        rows, start = [], 0
        for chunk in chunks:
            sequence, draft = chunk.sequence, drafts.get(chunk.sequence, Draft())
            # Guesses take free pages only: no other sequence gives its own for them.
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

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens are worth a guess; one follows those that are accepted."""
        params = sequence.params
        if not params.takes_logits_alone:
            return 0
        context: int = self._engine.model.config.max_position_embeddings
        left = min(params.max_new_tokens - len(sequence.output), context - len(sequence))
        return min(self._num_drafts, left - 1)

    def _verified(self, rows: list[_Row]) -> list[Event]:
        engine, scheduler = self._engine, self._engine.scheduler
        chunks = [row.chunk for row in rows]
        sure, starts = chunks, [chunk.sequence.num_computed for chunk in chunks]
        if self._kept is not None:
            sure = [chunk for chunk in chunks if not chunk.drafts]
            slots = [chunk.sequence.state_slot for chunk in chunks if chunk.drafts]
            self._kept.keep(engine.runner.states, slots)
        logits = engine.runner.compute(chunks)
        scheduler.advance(sure)
        events: list[Event] = []
        kinds: dict[Callable[[list[_Row], Tensor], list[list[int]]] | None, list[_Row]] = {}
        for row in rows:
            kinds.setdefault(self._verifier(row), []).append(row)
        for verify, own in kinds.items():
            places = [place for row in own for place in row.rows]
            part = logits
            if len(kinds) > 1:
                part = logits[torch.tensor(places, device=logits.device)]
            if verify is None:
                events += engine.sample([row.chunk.sequence for row in own], part)
            else:
                events += self._taken(own, verify(own, part), part)
        self._observe(chunks, starts)
        return events

    def _verifier(self, row: _Row) -> Callable[[list[_Row], Tensor], list[list[int]]] | None:
        """Return how the tokens of a sequence are chosen; None where there is nothing to verify."""
        if not row.draft.tokens:
            return None
        if row.chunk.sequence.params.takes_likeliest and type(self._engine.sampler) is Sampler:
            return self._greedy
        return self._repeated if repeats(self._engine, row.chunk.sequence) else self._drawn

    def _greedy(self, rows: list[_Row], logits: Tensor) -> list[list[int]]:
        return self._listed(self._sampling.verify_greedy(*self._guesses(rows), logits))

    def _repeated(self, rows: list[_Row], logits: Tensor) -> list[list[int]]:
        """Return what the sampler draws, up to the first that was guessed otherwise."""
        drawn = self._engine.sampler(logits, self._batch(rows))[0].tolist()
        found, start = [], 0
        for row in rows:
            count = 0
            for guess in row.draft.tokens:
                if guess != drawn[start + count]:
                    break
                count += 1
            found.append(drawn[start : start + count + 1])
            start += len(row.rows)
        return found

    def _drawn(self, rows: list[_Row], logits: Tensor) -> list[list[int]]:
        probs = None
        if rows[0].draft.probs is not None:
            held = [row.draft.probs for row in rows if row.draft.probs is not None]
            probs = held[0].new_zeros(len(rows), self._num_drafts, logits.shape[1])
            for place, each in enumerate(held):
                probs[place, : len(each)] = each
        guesses, batch = self._guesses(rows), self._batch(rows)
        return self._listed(self._sampling.verify(*guesses, logits, batch, probs))

    def _guesses(self, rows: list[_Row]) -> tuple[Tensor, Tensor]:
        """Return the guesses ``[B, S]``, of which zeros behind the last are none, and counts."""
        spare = self._num_drafts
        tokens = [[*row.draft.tokens, *[0] * (spare - len(row.draft.tokens))] for row in rows]
        counts = [len(row.draft.tokens) for row in rows]
        device = self._engine.device
        return torch.tensor(tokens, device=device), torch.tensor(counts, device=device)

    def _batch(self, rows: list[_Row]) -> SamplingBatch:
        sequences = [row.chunk.sequence for row in rows for _ in row.rows]
        ahead = [place for row in rows for place in range(len(row.rows))]
        engine = self._engine
        return sampling_batch(sequences, engine.model.config.vocab_size, engine.device, ahead)

    @staticmethod
    def _listed(tokens: Tensor) -> list[list[int]]:
        return [[token for token in row if token >= 0] for row in tokens.tolist()]

    def _taken(self, rows: list[_Row], found: list[list[int]], logits: Tensor) -> list[Event]:
        """Add tokens to sequences, the accepted guesses and one more to each, until it ends."""
        start = 0
        places: list[int] = []
        for row, tokens in zip(rows, found, strict=True):
            places += range(start, start + len(tokens))
            start += len(row.rows)
        flat = torch.tensor([*itertools.chain(*found)], device=logits.device)
        wide = logits[torch.tensor(places, device=logits.device)]
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
        chosen = wide.gather(-1, flat[:, None]).squeeze(-1)
        logprobs = iter((chosen - wide.logsumexp(-1)).tolist())
        events = []
        returned = []
        for row, tokens in zip(rows, found, strict=True):
            self.figures.drafted_tokens += len(row.draft.tokens)
            self.figures.accepted_tokens += len(tokens) - 1
            sequence = row.chunk.sequence
            for token, logprob in zip(tokens, itertools.islice(logprobs, len(tokens)), strict=True):
                if sequence.finish_reason is None:
                    events.append(self._engine.append(sequence, token, logprob))
            if sequence.finish_reason is not None:
                continue
            if self._kept is not None:
                if len(tokens) <= len(row.draft.tokens):
                    returned.append(sequence.state_slot)
                    continue
                self._engine.scheduler.advance([row.chunk])
            self._engine.scheduler.accept(row.chunk, len(tokens) - 1)
        if self._kept is not None:
            self._kept.restore(self._engine.runner.states, returned)
        return events


def repeats(engine: Engine, sequence: Sequence) -> bool:
    """Say whether the tokens of a sequence have to be those that the engine's sampler draws.

    A seed promises them, and nothing is known of a sampler that took the place of ours.
    """
    seeded = sequence.params.seed is not None or engine.draws_repeat
    return seeded or type(engine.sampler) is not Sampler
