"""Draft tokens from an MTP head, which reads hidden states that the target model computes anyway.

Dimensions: T tokens, B sequences, F size of the model's states that the head reads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from interposer_models._engine.request_batch import sampling_batch
from interposer_models._engine.runner import Runner
from interposer_models._engine.scheduler import Chunk
from interposer_models._engine.sequence import Sequence
from interposer_models._speculation.draft_sampling import DraftSampling
from interposer_models._speculation.head_runner import HeadRunner
from interposer_models._speculation.proposer import Draft, Proposer

_MOST_PENDING = 256  # pending states of a sequence, after which the head computes them at once


@dataclass(slots=True, eq=False)
class _Follower:
    """The head's view of a sequence: tokens, and states that the head has not computed yet.

    Attributes:
        head_sequence: The head's sequence; the first token follows the state at ``origin``.
        origin: Position of the first state.
        pending: States after the computed tokens.
    """

    head_sequence: Sequence
    origin: int
    pending: list[Tensor] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return sum(map(len, self.pending))

    @property
    def end(self) -> int:
        """Position of the next state."""
        return self.origin + self.head_sequence.num_computed + self.num_pending


class HeadProposer(Proposer):
    """Collects the states of sequences, which the head mostly computes when it drafts tokens.

    If a sequence finds no pages in the head's cache, the head starts over with the next state of
    the sequence. The head also starts late if the first states were not computed because the prefix
    was cached.
    """

    def __init__(
        self,
        runner: HeadRunner,
        target: Runner,
        sampling: DraftSampling,
        is_reproducible: Callable[[Sequence], bool],
    ) -> None:
        """Create a proposer without followers.

        Args:
            target: Runner of the target model, which records hidden states from now on.
            is_reproducible: As in ``ModelProposer``.
        """
        self._runner, self._target, self._sampling = runner, target, sampling
        self._is_reproducible = is_reproducible
        self._followers: dict[Sequence, _Follower] = {}

    def observe(self, sequence: Sequence, start: int, states: Tensor) -> None:
        """Add the states ``[T, F]`` of the positions from ``start`` on, all of accepted tokens."""
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

    def propose(self, sequences: Items[Sequence], counts: Items[int]) -> list[Draft]:
        """Draw draft tokens from the head; see ``Proposer``."""
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

    def forget(self, sequence: Sequence) -> None:
        """Free the pages of a sequence in the head's cache."""
        if follower := self._followers.pop(sequence, None):
            self._runner.scheduler.remove(follower.head_sequence)

    def _new_follower(self, sequence: Sequence, origin: int) -> _Follower:
        params = sequence.params.model_copy(update={"adapter": None})
        # ``~seed`` is another seed, but the same one in every run.
        seed = sequence.seed if self._is_reproducible(sequence) else ~sequence.seed
        pages: list[list[int]] = [[] for _ in self._runner.scheduler.pools]
        return _Follower(Sequence(sequence.id, [], params, seed, pages=pages), origin)

    def _restart(self, follower: _Follower, origin: int) -> None:
        """Let the head start over with the state at ``origin``."""
        self._runner.scheduler.remove(follower.head_sequence)
        follower.head_sequence.prompt.clear()
        follower.head_sequence.output.clear()
        follower.head_sequence.num_computed = 0
        follower.pending.clear()
        follower.origin = origin

    @staticmethod
    def _append_tokens(sequence: Sequence, follower: _Follower) -> None:
        """Append the known tokens that follow the collected states to the head's sequence."""
        num_known = follower.origin + 1 + len(follower.head_sequence.prompt)
        follower.head_sequence.prompt += sequence.tokens(
            num_known, min(len(sequence), follower.end + 1)
        )

    def _compute_pending(self, followers: Items[_Follower]) -> dict[_Follower, Tensor]:
        """Compute pending states, and return the head's state of the newest token of each follower.

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

    def _run_head(self, chunks: Items[Chunk], states: Tensor) -> Tensor:
        """Compute the head's states of the newest tokens."""
        self._assign(chunks)
        return self._runner.compute(chunks, states)

    # Sequences of the head have no adapter, but layers shared with the model need an assignment.
    def _assign(self, chunks: Items[Chunk]) -> None:
        if self._target.adapters is not None:
            self._target.adapters.assign(chunks)

    @staticmethod
    def _has_pending_tokens(follower: _Follower) -> bool:
        """Return whether known tokens of a follower are not computed yet."""
        return follower.head_sequence.num_computed < len(follower.head_sequence)

    def _draw_tokens(
        self, pairs: Items[tuple[Sequence, Sequence]], states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the next token for each pair of a sequence and a head sequence."""
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
