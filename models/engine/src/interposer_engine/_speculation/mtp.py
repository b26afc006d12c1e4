"""Draft tokens from an MTP head, which reads hidden states of the target model.

``HeadRunner`` runs the head on a separate paged KV cache, and ``HeadProposer`` draws the draft
tokens.

Dimensions: T tokens, B sequences, F size of the model's states that the head reads, H hidden size
of the head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interposer import Resolver, Site
from interposer.errors import ConfigError
from interposer_engine._batch import StepBatch
from interposer_engine._checkpoint.dequantize import dequantize_once
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.weight_check import WeightCheck
from interposer_engine._checkpoint.weights import Weights
from interposer_engine._engine import Engine
from interposer_engine._kv_cache import Caches
from interposer_engine._runner import Runner
from interposer_engine._sampling import sampling_batch
from interposer_engine._scheduler import Chunk, Scheduler
from interposer_engine._sequence import TokenSequence
from interposer_engine._speculation.proposers import Draft, DraftSampling, Proposer
from interposer_engine._speculation.settings import Speculation, Target, check_sources
from interposer_engine._speculation.speculator import is_reproducible
from interposer_models.decoder import DecoderFamily, HiddenStates, PredictionHead, family_errors


class HeadRunner:
    """Runs an MTP head on chunks of sequences with the hidden states of the preceding tokens.

    Attributes:
        scheduler: Hands out the pages.
    """

    def __init__(
        self,
        head: PredictionHead,
        device: str,
        *,
        page_size: int,
        num_pages: int,
        max_sequences: int,
        max_step_tokens: int,
        numerics: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Allocate the KV cache of the head; see ``Runner``."""
        caches = Caches(head, page_size, num_pages, max_sequences, max_step_tokens)
        self.head, self.device = head, device
        self.scheduler = Scheduler(caches.pools, max_sequences, max_step_tokens)
        self._backends, self._pool_indices = caches.backends, caches.pool_indices
        self._numerics = numerics
        self._caches = caches.allocate(device, 0)

    def compute(self, chunks: Sequence[Chunk], states: Tensor) -> Tensor:
        """Compute the head's hidden state of the newest token of each chunk, ``[B, H]``.

        Writes the keys and values of all tokens to the cache, but does not advance the sequences.

        Args:
            states: ``[T, H]``, of the tokens of all chunks.
        """
        page_size = self.scheduler.pools[0].page_size
        batch = StepBatch.build(chunks, page_size, self.device)
        self.head.reserve_positions(batch.attention.max_seq_tokens, self.device)
        with self._numerics():
            plan_by_backend = {
                backend: backend.plan(batch.by_pool[pool_index])
                for backend, pool_index in self._pool_indices.items()
            }
            plans = [plan_by_backend[backend] for backend in self._backends]
            # The newest token of each chunk is its last row.
            rows = batch.attention.query_starts[1:] - 1
            steps = batch.token_ids, states, batch.positions
            return self.head(*steps, self._caches, plans, rows)  # type: ignore[no-any-return]

    def fused(self, states: Tensor) -> Tensor:
        """Project hidden states of the target model to the head's input, ``[T, H]``."""
        with self._numerics():
            return self.head.fused(states)

    def logits(self, states: Tensor) -> Tensor:
        """Compute the logits of the head's hidden states."""
        with self._numerics():
            return self.head.logits(states)


_MOST_PENDING = 256  # pending states of a sequence, after which the head computes them at once


@dataclass(slots=True, eq=False)
class _Follower:
    """The head's copy of a sequence: its tokens, and hidden states still to be computed.

    Attributes:
        head_sequence: The head's sequence; the first token follows the state at ``origin``.
        origin: Position of the first state.
        pending: States after the computed tokens.
    """

    head_sequence: TokenSequence
    origin: int
    pending: list[Tensor] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return sum(map(len, self.pending))

    @property
    def end(self) -> int:
        """Position of the next hidden state to add."""
        return self.origin + self.head_sequence.num_computed + self.num_pending


class HeadProposer(Proposer):
    """Proposes draft tokens by an MTP head, and collects the hidden states that the head reads.

    If a sequence finds no pages in the head's cache, the head starts over with the next state of
    the sequence. The head also starts late if the first states were not computed because the prefix
    was cached.
    """

    def __init__(
        self,
        runner: HeadRunner,
        target: Runner,
        sampling: DraftSampling,
        is_reproducible: Callable[[TokenSequence], bool],
    ) -> None:
        """Create a proposer that follows no sequence yet.

        Args:
            target: Runner of the target model, which records hidden states from now on.
            is_reproducible: As in ``ModelProposer``.
        """
        self._runner, self._target, self._sampling = runner, target, sampling
        self._is_reproducible = is_reproducible
        self._followers: dict[TokenSequence, _Follower] = {}

    def observe(self, sequence: TokenSequence, start: int, states: Tensor) -> None:
        """Add hidden states ``[T, F]`` of accepted tokens at the positions from ``start`` on."""
        follower = self._followers.get(sequence)
        if follower is None:
            follower = self._followers[sequence] = self._new_follower(sequence, start)
        if start > follower.end:
            self._restart(follower, start)
        new_states = states[follower.end - start :]
        if len(new_states):
            follower.pending.append(new_states.clone())
        if follower.num_pending > _MOST_PENDING:
            self._append_tokens(sequence, follower)
            self._compute_pending([follower])

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[Draft]:
        """Draw draft tokens from the head's logits; see ``Proposer``."""
        tokens: list[list[int]] = [[] for _ in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        followers = {
            index: follower
            for index, sequence in enumerate(sequences)
            if (follower := self._followers.get(sequence)) is not None
            and follower.end == len(sequence) - 1
        }
        for index, follower in followers.items():
            self._append_tokens(sequences[index], follower)
        states = self._compute_pending([*followers.values()])
        active = [index for index, follower in followers.items() if follower in states]
        num_confirmed = {index: followers[index].head_sequence.num_computed for index in active}
        rows = [states[followers[index]] for index in active]
        while active:
            stacked = torch.stack(rows)
            pairs = [(sequences[index], followers[index].head_sequence) for index in active]
            new_tokens, distribution = self._draw_tokens(pairs, stacked)
            for row, (index, token) in enumerate(zip(active, new_tokens.tolist(), strict=True)):
                followers[index].head_sequence.output.append(token)
                tokens[index].append(token)
                if distribution is not None:
                    probs[index].append(distribution[row])
            chunks, continuing, inputs = [], [], []
            for row, index in enumerate(active):
                if len(tokens[index]) == counts[index]:
                    continue
                chunk = self._runner.scheduler.next_alone(followers[index].head_sequence)
                if chunk is not None:
                    chunks.append(chunk)
                    continuing.append(index)
                    inputs.append(row)
            if chunks:
                rows = [*self._run_head(chunks, stacked[inputs])]
                for chunk in chunks:
                    # Draft tokens may be rejected, so they must not free pages of a window.
                    chunk.sequence.num_computed += 1
            active = continuing
        # Remove the draft tokens again: the next call learns from the sequence which were accepted.
        for index, count in num_confirmed.items():
            head_sequence = followers[index].head_sequence
            head_sequence.output.clear()
            head_sequence.num_computed = count
        return [
            Draft(tuple(drafted), torch.stack(distributions) if distributions else None)
            for drafted, distributions in zip(tokens, probs, strict=True)
        ]

    def forget(self, sequence: TokenSequence) -> None:
        """Free the pages that a sequence has in the head's KV cache."""
        if follower := self._followers.pop(sequence, None):
            self._runner.scheduler.remove(follower.head_sequence)

    def _new_follower(self, sequence: TokenSequence, origin: int) -> _Follower:
        params = sequence.params.model_copy(update={"adapter": None})
        # ``~seed`` is another seed, but the same one in every run.
        seed = sequence.seed if self._is_reproducible(sequence) else ~sequence.seed
        pages: list[list[int]] = [[] for _ in self._runner.scheduler.pools]
        return _Follower(TokenSequence(sequence.id, [], params, seed, pages=pages), origin)

    def _restart(self, follower: _Follower, origin: int) -> None:
        """Let the head start over with the hidden state at position ``origin``."""
        self._runner.scheduler.remove(follower.head_sequence)
        follower.head_sequence.prompt.clear()
        follower.head_sequence.output.clear()
        follower.head_sequence.num_computed = 0
        follower.pending.clear()
        follower.origin = origin

    @staticmethod
    def _append_tokens(sequence: TokenSequence, follower: _Follower) -> None:
        """Append the known tokens after the collected hidden states to the head's sequence."""
        num_known = follower.origin + 1 + len(follower.head_sequence.prompt)
        follower.head_sequence.prompt += sequence.tokens(
            num_known, min(len(sequence), follower.end + 1)
        )

    def _compute_pending(self, followers: Sequence[_Follower]) -> dict[_Follower, Tensor]:
        """Run the head on all pending hidden states; return its state of each newest token.

        Followers that find no pages start over and are missing in the result.
        """
        scheduler, state_by_follower = self._runner.scheduler, dict[_Follower, Tensor]()
        active = [follower for follower in followers if follower.pending]
        while active:
            budget, chunks, inputs, chunk_followers = scheduler.max_step_tokens, [], [], []
            for follower in active:
                if not budget:
                    break
                chunk = scheduler.next_alone(follower.head_sequence, budget)
                if chunk is None:
                    self._restart(follower, follower.end)
                    continue
                states = torch.cat(follower.pending)
                inputs.append(states[: chunk.num_tokens])
                remaining = states[chunk.num_tokens :]
                follower.pending = [remaining] if len(remaining) else []
                budget -= chunk.num_tokens
                chunks.append(chunk)
                chunk_followers.append(follower)
            if chunks:
                states = self._run_head(chunks, self._runner.fused(torch.cat(inputs)))
                scheduler.advance(chunks)
                state_by_follower |= dict(zip(chunk_followers, states, strict=True))
            active = [follower for follower in active if self._has_pending_tokens(follower)]
        return state_by_follower

    def _run_head(self, chunks: Sequence[Chunk], states: Tensor) -> Tensor:
        """Compute the head's hidden states of the chunks' newest tokens."""
        self._assign(chunks)
        return self._runner.compute(chunks, states)

    # Sequences of the head have no adapter, but layers shared with the model need an assignment.
    def _assign(self, chunks: Sequence[Chunk]) -> None:
        if self._target.adapters is not None:
            self._target.adapters.assign(chunks)

    @staticmethod
    def _has_pending_tokens(follower: _Follower) -> bool:
        return follower.head_sequence.num_computed < len(follower.head_sequence)

    def _draw_tokens(
        self, pairs: Sequence[tuple[TokenSequence, TokenSequence]], states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the next draft token for each pair of a target sequence and a head sequence."""
        model = self._target.model
        self._assign([Chunk(head_sequence, 1) for _, head_sequence in pairs])
        logits = self._runner.logits(states)
        num_output = [len(sequence.output) for sequence, _ in pairs]
        batch = sampling_batch(
            [head_sequence for _, head_sequence in pairs],
            model.config.vocab_size,
            self._target.device,
            num_output,
        )
        return self._sampling.draw(logits.float(), batch)


class HeadDraftSource:
    """Draft source that runs a loaded MTP head.

    Args:
        page_size: Page size of the head's attention.
        description: Description for people.
        notes: Remarks on the weights of the head.
    """

    certain = False

    def __init__(
        self,
        head: PredictionHead,
        settings: Speculation,
        target: Target,
        page_size: int,
        description: str,
        notes: Sequence[str],
    ) -> None:
        planned = target.planned
        self.notes = notes
        tokens = settings.cache_tokens or target.default_tokens
        self._description = description
        self._runner = HeadRunner(
            head,
            planned.placement.device.torch_device,
            page_size=page_size,
            num_pages=-(-tokens // page_size),
            max_sequences=target.max_sequences,
            max_step_tokens=target.max_step_tokens,
            numerics=planned.numerics,
        )

    def __str__(self) -> str:
        return self._description

    def proposer(self, engine: Engine, sampling: DraftSampling, num_drafts: int) -> Proposer:
        """Create a proposer that runs the head for an engine's sequences; see ``DraftSource``.

        Raises: ConfigError: the model does not expose hidden states.
        """
        engine.runner.record_hidden_states(HiddenStates(self._runner.head.layers))
        return HeadProposer(self._runner, engine.runner, sampling, partial(is_reproducible, engine))


def load_checkpoint_head(settings: Speculation, target: Target) -> HeadDraftSource:
    """Load the MTP head in the model's own checkpoint.

    Raises:
        ConfigError: the checkpoint contains no supported head.
        CheckpointError: the tensors of the head are incomplete.
    """
    planned, checkpoint = target.planned, target.checkpoint
    check_sources(planned.path, planned.model)
    site = Site(planned.resolver, "", planned.dtype)
    head: PredictionHead | None = None
    # Only families that derive from DecoderFamily can define an MTP head.
    if isinstance(checkpoint, Checkpoint) and isinstance(planned.decoder, DecoderFamily):
        model: Any = planned.model
        with torch.device("meta"), family_errors(planned.resolver, "prediction_head"):
            head = planned.decoder.prediction_head(site, model, planned.page_size)
    if (
        head is None
        or not isinstance(checkpoint, Checkpoint)
        or not any(map(head.renamed, checkpoint.names()))
    ):
        raise ConfigError(
            f"{planned.path} holds no head that predicts further tokens. Try: "
            "speculation='ngram', or the path of a draft model"
        )
    notes = dequantize_once(head, site, planned.placement)
    load_head(head, checkpoint, target)
    page_size, description = planned.page_size, "the checkpoint's own head"
    return HeadDraftSource(head, settings, target, page_size, description, notes)


def load_head(
    head: PredictionHead, checkpoint: Checkpoint, target: Target, resolver: Resolver | None = None
) -> None:
    """Load the tensors of an MTP head from a checkpoint.

    Args:
        resolver: Resolver of the head's kernels; None for that of the model.
    """
    planned = target.planned
    device = planned.placement.device.torch_device
    weights = Weights(head, device, WeightCheck.of(planned))

    def is_read(name: str) -> bool:
        renamed = head.renamed(name)
        return renamed is not None and not renamed.startswith(head.unread)

    tensors = checkpoint.stream(is_read)
    names = [*filter(is_read, checkpoint.names())]
    scheme = (resolver or planned.resolver).scheme
    with planned.numerics():
        dequantized = tensors if scheme is None else scheme.restored(tensors, weights)
        weights.load(dequantized, checkpoint.path, None, names)
        head.reserve_positions(0, device)
