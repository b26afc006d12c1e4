"""Guesses by a smaller model, whose engine follows the sequences of the larger one.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from interposer_models._engine.engine import Engine
from interposer_models._engine.request_batch import sampling_batch
from interposer_models._engine.sequence import Sequence
from interposer_models._speculation.draft_sampling import DraftSampling
from interposer_models._speculation.kept_states import KeptStates
from interposer_models._speculation.proposer import Draft, Proposer


class ModelProposer(Proposer):
    """Keeps a sequence of the draft model beside each one that it is asked for.

    It takes pages of the draft's cache as long as there are any; a sequence that finds none, whose
    prompt is not computed yet, or which exceeds the draft's context, gets no guess.
    """

    def __init__(
        self,
        draft: Engine,
        sampling: DraftSampling,
        vocab_size: int,
        device: str,
        num_drafts: int,
        repeats: Callable[[Sequence], bool],
        kept: KeptStates | None = None,
    ) -> None:
        """Compute nothing yet.

        Args:
            sampling, vocab_size, device: of the model that verifies.
            num_drafts: for a sequence at most.
            repeats: whether a sequence is verified by the noise of its seed, so that a guess drawn
                by the same noise is the likelier one. Others must be drawn by another.
            kept: states of the draft before guesses; None where it has none.
        """
        self._draft = draft
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._device = device
        self._num_drafts = num_drafts
        self._repeats = repeats
        self._kept = kept
        self._followers: dict[Sequence, Sequence] = {}
        self._sure: dict[Sequence, int] = {}  # tokens of a follower that its kept states hold

    def propose(self, sequences: Items[Sequence], counts: Items[int]) -> list[Draft]:
        """Return what the draft model draws; see ``Proposer``."""
        scheduler = self._draft.scheduler
        tokens: list[list[int]] = [[] for _ in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        followers = [self._follower(sequence) for sequence in sequences]
        going = [place for place, own in enumerate(followers) if self._fits(own, counts[place])]
        confirmed = True
        while going:
            budget, chunks, drawn = scheduler.max_step_tokens, [], []
            for place in going:
                if chunk := scheduler.next_alone(followers[place], budget):
                    budget -= chunk.num_tokens
                    chunks.append(chunk)
                    if chunk.is_last:
                        drawn.append(place)
            if not chunks:
                break
            logits = self._draft.runner.compute(chunks)
            if confirmed:
                scheduler.advance(chunks)
            else:
                # Guesses may be taken back, so that no page comes back on account of them.
                for chunk in chunks:
                    chunk.sequence.num_computed += chunk.num_tokens
            confirmed = False
            if drawn:
                self._keep([followers[place] for place in drawn if not tokens[place]])
                found, mass = self._drawn([followers[place] for place in drawn], logits)
                for row, (place, token) in enumerate(zip(drawn, found.tolist(), strict=True)):
                    followers[place].output.append(token)
                    tokens[place].append(token)
                    if mass is not None:
                        probs[place].append(mass[row])
            going = [place for place in drawn if len(tokens[place]) < counts[place]]
        return [
            Draft(tuple(own), torch.stack(mass) if mass else None)
            for own, mass in zip(tokens, probs, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Give back the pages of the draft's cache."""
        if follower := self._followers.pop(sequence, None):
            self._sure.pop(follower, None)
            self._draft.scheduler.remove(follower)

    def _fits(self, follower: Sequence, count: int) -> bool:
        """Say whether the draft can compute a sequence: a vocabulary may be padded differently."""
        if self._kept is not None and follower.state_slot < 0:
            return False
        size = self._draft.model.config.vocab_size
        pending = follower.tokens(follower.num_computed, len(follower))
        return len(follower) + count <= self._draft.runner.longest and max(pending) < size

    def _follower(self, sequence: Sequence) -> Sequence:
        """Return the draft's sequence with the tokens of ``sequence``, of which some are cached."""
        follower = self._followers.get(sequence)
        if follower is None:
            params = sequence.params.model_copy(update={"adapter": None})
            seed = sequence.seed if self._repeats(sequence) else ~sequence.seed
            follower = self._draft.sequence(sequence.prompt, params, seed)
            follower.state_slot = self._draft.pool.take_slot()
            self._followers[sequence] = follower
        guessed, output = follower.output, sequence.output
        # Only the last tokens were guesses.
        same = max(0, len(guessed) - self._num_drafts)
        while same < min(len(guessed), len(output)) and guessed[same] == output[same]:
            same += 1
        guessed[same:] = output[same:]
        cached = min(len(sequence.prompt) + same, len(sequence) - 1)
        if cached < follower.num_computed:
            follower.num_computed = cached
            if self._kept is not None:
                self._kept.restore(self._draft.runner.states, [follower.state_slot])
                follower.num_computed = self._sure[follower]
        return follower

    def _keep(self, followers: list[Sequence]) -> None:
        """Keep the states of followers that hold no guess yet."""
        if self._kept is not None and followers:
            slots = [follower.state_slot for follower in followers]
            self._kept.keep(self._draft.runner.states, slots)
            self._sure |= {follower: follower.num_computed for follower in followers}

    def _drawn(self, sequences: list[Sequence], logits: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = logits[:, : self._vocab_size].float().to(self._device)
        if (missing := self._vocab_size - logits.shape[1]) > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        batch = sampling_batch(sequences, self._vocab_size, self._device)
        return self._sampling.draw(logits, batch)
