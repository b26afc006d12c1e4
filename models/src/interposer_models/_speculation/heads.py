"""Guesses by a prediction head, which reads the states that the model computes anyway.

Dimensions: T tokens, B sequences, F size of a state of the model, V vocabulary.
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

_MOST_PENDING = 256  # states of a sequence that wait for a guess, before they are computed


@dataclass(slots=True, eq=False)
class _Follower:
    """The tokens and states of a sequence, as far as a head knows them.

    Attributes:
        own: the tokens of the head, the first of which is the one behind ``origin``.
        origin: position of the first state.
        pending: states behind those of the tokens that are computed.
    """

    own: Sequence
    origin: int
    pending: list[Tensor] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return sum(map(len, self.pending))

    @property
    def end(self) -> int:
        """The position of the next state."""
        return self.origin + self.own.num_computed + self.num_pending


class HeadProposer(Proposer):
    """Keeps the states of sequences until the head computes them, in steps with guesses mostly.

    A sequence that finds no pages in the cache of the head begins there anew with its next state,
    and so does one whose first states were not computed, as others had computed its prefix.
    """

    def __init__(
        self,
        runner: HeadRunner,
        target: Runner,
        sampling: DraftSampling,
        repeats: Callable[[Sequence], bool],
    ) -> None:
        """Compute nothing yet.

        Args:
            target: of the model that verifies, whose hidden states it receives from now on.
            repeats: as that of ``ModelProposer``.
        """
        self._runner, self._target, self._sampling = runner, target, sampling
        self._repeats = repeats
        self._followers: dict[Sequence, _Follower] = {}

    def observe(self, sequence: Sequence, start: int, states: Tensor) -> None:
        """Take the states ``[T, F]`` of positions from ``start``, all of tokens that stay."""
        follower = self._followers.get(sequence)
        if follower is None:
            follower = self._followers[sequence] = self._begun(sequence, start)
        if start > follower.end:
            self._restart(follower, start)
        fresh = states[follower.end - start :]
        if len(fresh):
            follower.pending.append(fresh.clone())
        if follower.num_pending > _MOST_PENDING:
            self._learn(sequence, follower)
            self._compute([follower])

    def propose(self, sequences: Items[Sequence], counts: Items[int]) -> list[Draft]:
        """Return what the head draws; see ``Proposer``."""
        tokens: list[list[int]] = [[] for _ in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        followers = {
            place: follower
            for place, sequence in enumerate(sequences)
            if (follower := self._followers.get(sequence)) is not None
            and follower.end == len(sequence) - 1
        }
        for place, follower in followers.items():
            self._learn(sequences[place], follower)
        states = self._compute([*followers.values()])
        going = [place for place, follower in followers.items() if follower in states]
        sure = {place: followers[place].own.num_computed for place in going}
        rows = [states[followers[place]] for place in going]
        while going:
            stacked = torch.stack(rows)
            shadows = [(sequences[place], followers[place].own) for place in going]
            found, mass = self._drawn(shadows, stacked)
            for row, (place, token) in enumerate(zip(going, found.tolist(), strict=True)):
                followers[place].own.output.append(token)
                tokens[place].append(token)
                if mass is not None:
                    probs[place].append(mass[row])
            chunks, following, inputs = [], [], []
            for row, place in enumerate(going):
                if len(tokens[place]) == counts[place]:
                    continue
                chunk = self._runner.scheduler.next_alone(followers[place].own)
                if chunk is not None:
                    chunks.append(chunk)
                    following.append(place)
                    inputs.append(row)
            if chunks:
                rows = [*self._computed(chunks, stacked[inputs])]
                for chunk in chunks:
                    # Guesses may be taken back, so that no page comes back on account of them.
                    chunk.sequence.num_computed += 1
            going = following
        for place, count in sure.items():
            own = followers[place].own
            own.output.clear()
            own.num_computed = count
        return [
            Draft(tuple(found), torch.stack(mass) if mass else None)
            for found, mass in zip(tokens, probs, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Give back the pages of the head's cache."""
        if follower := self._followers.pop(sequence, None):
            self._runner.scheduler.remove(follower.own)

    def _begun(self, sequence: Sequence, origin: int) -> _Follower:
        params = sequence.params.model_copy(update={"adapter": None})
        seed = sequence.seed if self._repeats(sequence) else ~sequence.seed
        pages: list[list[int]] = [[] for _ in self._runner.scheduler.pools]
        return _Follower(Sequence(sequence.id, [], params, seed, pages=pages), origin)

    def _restart(self, follower: _Follower, origin: int) -> None:
        """Let the head begin with the state of a position."""
        self._runner.scheduler.remove(follower.own)
        follower.own.prompt.clear()
        follower.own.output.clear()
        follower.own.num_computed = 0
        follower.pending.clear()
        follower.origin = origin

    @staticmethod
    def _learn(sequence: Sequence, follower: _Follower) -> None:
        """Take in the tokens that follow the states, as far as they are known."""
        known = follower.origin + 1 + len(follower.own.prompt)
        follower.own.prompt += sequence.tokens(known, min(len(sequence), follower.end + 1))

    def _compute(self, followers: Items[_Follower]) -> dict[_Follower, Tensor]:
        """Compute what pends, and return the head's state of the newest token of each.

        Those that find no pages begin anew, and have none.
        """
        scheduler, found = self._runner.scheduler, dict[_Follower, Tensor]()
        going = [follower for follower in followers if follower.pending]
        while going:
            budget, chunks, inputs, chosen = scheduler.max_step_tokens, [], [], []
            for follower in going:
                if not budget:
                    break
                chunk = scheduler.next_alone(follower.own, budget)
                if chunk is None:
                    self._restart(follower, follower.end)
                    continue
                states = torch.cat(follower.pending)
                inputs.append(states[: chunk.num_tokens])
                rest = states[chunk.num_tokens :]
                follower.pending = [rest] if len(rest) else []
                budget -= chunk.num_tokens
                chunks.append(chunk)
                chosen.append(follower)
            if chunks:
                states = self._computed(chunks, self._runner.fused(torch.cat(inputs)))
                scheduler.advance(chunks)
                found |= dict(zip(chosen, states, strict=True))
            going = [follower for follower in going if self._unfinished(follower)]
        return found

    def _computed(self, chunks: Items[Chunk], states: Tensor) -> Tensor:
        """Return the head's states of the newest tokens, computed without adapters."""
        self._assign(chunks)
        return self._runner.compute(chunks, states)

    def _assign(self, chunks: Items[Chunk]) -> None:
        if self._target.adapters is not None:
            self._target.adapters.assign(chunks)

    @staticmethod
    def _unfinished(follower: _Follower) -> bool:
        """Say whether states pend whose next tokens are known."""
        return follower.own.num_computed < len(follower.own)

    def _drawn(
        self, shadows: Items[tuple[Sequence, Sequence]], states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Draw a token for each sequence and its own one of the head, by the head's states."""
        model = self._target.model
        self._assign([Chunk(own, 1) for _, own in shadows])
        logits = self._runner.logits(states)
        behind = [len(sequence.output) for sequence, _ in shadows]
        batch = sampling_batch(
            [own for _, own in shadows], model.config.vocab_size, self._target.device, behind
        )
        return self._sampling.draw(logits.float(), batch)
