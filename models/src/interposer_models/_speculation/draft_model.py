"""Draft tokens from a smaller model, which follows the sequences of the target model.

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
from interposer_models._speculation.proposer import Draft, Proposer
from interposer_models._speculation.saved_states import SavedStates


class ModelProposer(Proposer):
    """Keeps a follower in the draft model for each target sequence.

    Followers take pages of the draft model's cache while there are any. A sequence gets no draft
    tokens if its follower finds no pages, has not computed the prompt yet, or exceeds the draft
    model's context.
    """

    def __init__(
        self,
        draft: Engine,
        sampling: DraftSampling,
        vocab_size: int,
        device: str,
        num_drafts: int,
        is_reproducible: Callable[[Sequence], bool],
        saved: SavedStates | None = None,
    ) -> None:
        """Create a proposer without followers.

        Args:
            draft: Engine of the draft model.
            sampling, vocab_size, device: Parameters of the target model.
            num_drafts: Largest number of draft tokens per sequence.
            is_reproducible: Whether a sequence is verified with the noise of the seed. Then draft
                tokens drawn with the same noise are likelier to be accepted. Other sequences must
                be drafted with different noise.
            saved: States of the draft model before draft tokens; None without recurrent states.
        """
        self._draft = draft
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._device = device
        self._num_drafts = num_drafts
        self._is_reproducible = is_reproducible
        self._saved = saved
        self._followers: dict[Sequence, Sequence] = {}
        self._num_saved: dict[Sequence, int] = {}  # tokens in a follower's saved states

    def propose(self, sequences: Items[Sequence], counts: Items[int]) -> list[Draft]:
        """Draw draft tokens from the draft model; see ``Proposer``."""
        scheduler = self._draft.scheduler
        tokens: list[list[int]] = [[] for _ in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        followers = [self._follower(sequence) for sequence in sequences]
        active = [
            index for index, follower in enumerate(followers) if self._fits(follower, counts[index])
        ]
        is_first_step = True
        while active:
            budget, chunks, drawn_indices = scheduler.max_step_tokens, [], []
            for index in active:
                if chunk := scheduler.next_alone(followers[index], budget):
                    budget -= chunk.num_tokens
                    chunks.append(chunk)
                    if chunk.is_last:
                        drawn_indices.append(index)
            if not chunks:
                break
            logits = self._draft.runner.compute(chunks)
            # The first step computes accepted tokens only; later steps compute draft tokens.
            if is_first_step:
                scheduler.advance(chunks)
            else:
                # Draft tokens may be rejected, so they must not free pages of a window.
                for chunk in chunks:
                    chunk.sequence.num_computed += chunk.num_tokens
            is_first_step = False
            if drawn_indices:
                self._save_states(
                    [followers[index] for index in drawn_indices if not tokens[index]]
                )
                new_tokens, distribution = self._draw_tokens(
                    [followers[index] for index in drawn_indices], logits
                )
                for row, (index, token) in enumerate(
                    zip(drawn_indices, new_tokens.tolist(), strict=True)
                ):
                    followers[index].output.append(token)
                    tokens[index].append(token)
                    if distribution is not None:
                        probs[index].append(distribution[row])
            active = [index for index in drawn_indices if len(tokens[index]) < counts[index]]
        return [
            Draft(tuple(drafted), torch.stack(distributions) if distributions else None)
            for drafted, distributions in zip(tokens, probs, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Free the pages of a sequence's follower."""
        if follower := self._followers.pop(sequence, None):
            self._num_saved.pop(follower, None)
            self._draft.scheduler.remove(follower)

    def _fits(self, follower: Sequence, count: int) -> bool:
        """Return whether the draft model can compute a follower.

        The vocabulary of the draft model may be padded less than the target's.
        """
        if self._saved is not None and follower.state_slot < 0:
            return False
        size = self._draft.model.config.vocab_size
        pending = follower.tokens(follower.num_computed, len(follower))
        return len(follower) + count <= self._draft.runner.longest and max(pending) < size

    def _follower(self, sequence: Sequence) -> Sequence:
        """Return the follower of a sequence, updated to the sequence's tokens."""
        follower = self._followers.get(sequence)
        if follower is None:
            params = sequence.params.model_copy(update={"adapter": None})
            # ``~seed`` is another seed, but the same one in every run.
            seed = sequence.seed if self._is_reproducible(sequence) else ~sequence.seed
            follower = self._draft.sequence(sequence.prompt, params, seed)
            follower.state_slot = self._draft.pool.take_slot()
            self._followers[sequence] = follower
        drafted, output = follower.output, sequence.output
        # Only the last tokens can be rejected draft tokens.
        num_equal = max(0, len(drafted) - self._num_drafts)
        while (
            num_equal < min(len(drafted), len(output)) and drafted[num_equal] == output[num_equal]
        ):
            num_equal += 1
        drafted[num_equal:] = output[num_equal:]
        num_valid = min(len(sequence.prompt) + num_equal, len(sequence) - 1)
        if num_valid < follower.num_computed:
            follower.num_computed = num_valid
            if self._saved is not None:
                self._saved.restore(self._draft.runner.states, [follower.state_slot])
                follower.num_computed = self._num_saved[follower]
        return follower

    def _save_states(self, followers: list[Sequence]) -> None:
        """Save the recurrent states of followers that contain no draft token yet."""
        if self._saved is not None and followers:
            slots = [follower.state_slot for follower in followers]
            self._saved.save(self._draft.runner.states, slots)
            self._num_saved |= {follower: follower.num_computed for follower in followers}

    def _draw_tokens(
        self, sequences: list[Sequence], logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logits = logits[:, : self._vocab_size].float().to(self._device)
        if (missing := self._vocab_size - logits.shape[1]) > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        batch = sampling_batch(sequences, self._vocab_size, self._device)
        return self._sampling.draw(logits, batch)
