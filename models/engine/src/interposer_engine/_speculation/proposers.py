"""Objects that propose draft tokens, and the kernels that sample and verify draft tokens.

``ModelProposer`` runs a smaller model, which follows the sequences of the target model.
``NgramProposer`` looks up the newest tokens in the earlier ones.

Dimensions: R rows of logits, B sequences, S most draft tokens per sequence, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from interposer import CustomOp, Site
from interposer_engine._engine import Engine
from interposer_engine._kv_cache import slots_for
from interposer_engine._pages import States, copy_rows
from interposer_engine._prompt_runs import FIRST_VIRTUAL_ID
from interposer_engine._sampling import sampling_batch
from interposer_engine._sampling_fields import Draw
from interposer_engine._sampling_params import marked_fields
from interposer_engine._sequence import TokenSequence
from interposer_models.decoder import RecurrentLayer
from interposer_ops.devices.host_memory import cache_memory
from interposer_ops.layers.sampler import SamplingBatch
from interposer_ops.sampling import greedy_verify, gumbel_argmax, rejection_sample


class DraftSampling:
    """Kernels that sample and verify draft tokens; bound only by engines with a proposer.

    The distribution of a row is that of ``sample_tokens``: the fields of ``SamplingParams`` with
    the marker ``Draw`` apply in their order.
    """

    def __init__(self, site: Site, vocab_size: int, num_drafts: int, certain: bool) -> None:
        """Bind the kernels that sample and verify draft tokens.

        Args:
            num_drafts: S.
            certain: Whether the proposer has no distributions, as with prompt lookup.
        Raises: InterposerError: the policy leaves no kernel for an op.
        """
        draft_sizes = {"vocab_size": vocab_size, "num_draft_tokens": num_drafts}
        wide_site = replace(site, dtype=torch.promote_types(site.dtype, torch.float32))

        def bound(op: CustomOp[..., Any]) -> Callable[..., Tensor]:
            return wide_site.bind(op, vocab_size=vocab_size)

        self._num_drafts = num_drafts
        self._wide_dtype = wide_site.dtype
        self._greedy_verify = site.bind(greedy_verify, **draft_sizes)
        self._verify = wide_site.bind(rejection_sample, **draft_sizes, certain_drafts=certain)
        names_by_op: dict[CustomOp[..., Any], list[str]] = {}
        for name, draw in marked_fields(Draw).items():
            names_by_op.setdefault(draw.op, []).append(name)
        self._kernels = [(bound(op), names) for op, names in names_by_op.items()]
        self._draw = None if certain else bound(gumbel_argmax)

    def draw(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor | None]:
        """Draw one draft token per row of a draft model's logits.

        Args:
            logits: ``[R, V]``, any float dtype.
        Returns: tokens ``[R]`` int64, and the distributions ``[R, V]`` in float32 or wider; None if
            all rows are greedy.
        """
        if batch.temperature is None or self._draw is None:
            return logits.argmax(-1), None
        logits = self._process_logits(logits, batch)
        # The logits are divided already: temperature 1 adds noise, and 0 takes the argmax.
        temperature = (batch.temperature > 0).to(torch.float32)
        return self._draw(logits, temperature, batch.seeds, batch.steps), logits.softmax(-1)

    def verify_greedy(self, drafts: Tensor, counts: Tensor, logits: Tensor) -> Tensor:
        """Return the tokens of greedy decoding, verified: ``[B, S + 1]`` int64, padded with -1.

        Args:
            drafts: ``[B, S]`` int64.
            counts: ``[B]`` int64, number of draft tokens of each sequence.
            logits: ``[R, V]``, dtype of the site: for each sequence the row of the newest token,
                then the rows of the draft tokens.
        """
        return self._greedy_verify(drafts, self._padded_rows(logits, counts), counts)[0]

    def verify(
        self,
        drafts: Tensor,
        counts: Tensor,
        logits: Tensor,
        batch: SamplingBatch,
        probs: Tensor | None,
    ) -> Tensor:
        """Accept draft tokens by rejection sampling, so that tokens follow the target distribution.

        Args:
            drafts, counts, logits: As in ``verify_greedy``, also the result.
            batch: Parameters of the R rows, not all greedy.
            probs: ``[B, S, V]``, the distributions of the draft tokens; None for a proposer without
                distributions.
        """
        target = self._padded_rows(self._process_logits(logits, batch).softmax(-1), counts)
        firsts = (counts + 1).cumsum(0) - counts - 1
        noise = batch.seeds[firsts], batch.steps[firsts]
        return self._verify(drafts, probs, target, counts, *noise)[0]

    def _process_logits(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Apply the sampling parameters to logits; their softmax is the sampling distribution."""
        logits = logits.to(self._wide_dtype)
        for kernel, names in self._kernels:
            columns = [getattr(batch, name) for name in names]
            if any(column is not None for column in columns):
                logits = kernel(logits, *columns)
        return logits

    def _padded_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return logits ``[R, V]`` as ``[B, S + 1, V]``, padded by repeating each last row."""
        num_rows = self._num_drafts + 1
        if len(rows) == len(counts) * num_rows:
            return rows.view(len(counts), num_rows, -1)
        firsts = (counts + 1).cumsum(0) - counts - 1
        offsets = torch.arange(num_rows, device=counts.device)
        return rows[firsts[:, None] + torch.minimum(offsets, counts[:, None])]


class SavedStates:
    """Second copies of recurrent-state rows, to restore after a draft token was rejected."""

    def __init__(self, layers: Sequence[RecurrentLayer], max_sequences: int, device: str) -> None:
        """Allocate memory for the copies.

        Args:
            max_sequences: Most sequences with a state at once.
        """
        count = slots_for(max_sequences)
        layouts = [layer.state_layout() for layer in layers]
        self._copies = [layout.allocate(count, device, cache_memory) for layout in layouts]

    def save(self, states: States, slots: Sequence[int]) -> None:
        """Copy the current recurrent-state rows of sequences."""
        copy_rows(states, slots, self._copies, slots)

    def restore(self, states: States, slots: Sequence[int]) -> None:
        """Restore the last copies of the sequences' recurrent-state rows."""
        copy_rows(self._copies, slots, states, slots)


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens proposed for one sequence, with their probabilities.

    Attributes:
        tokens: The draft tokens.
        probs: ``[S, V]`` for S tokens, in float32 or wider: the distribution that each token was
            drawn from; None if the tokens were chosen without chance.
    """

    tokens: tuple[int, ...] = ()
    probs: Tensor | None = None


class Proposer(ABC):
    """Interface that proposes draft tokens, with state per sequence until ``forget``."""

    def observe(self, sequence: TokenSequence, start: int, states: Tensor) -> None:
        """Record hidden states ``[T, F]`` of accepted tokens at the positions from ``start`` on.

        Called if the model's runner records hidden states. Most proposers need tokens only.
        """
        return None

    @abstractmethod
    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[Draft]:
        """Return a draft for each sequence, of at most ``counts[i]`` draft tokens."""

    @abstractmethod
    def forget(self, sequence: TokenSequence) -> None:
        """Drop the state kept for a sequence that has ended; do nothing for an unknown sequence."""


class ModelProposer(Proposer):
    """Proposes tokens by a draft model, which holds a copy (follower) of each target sequence.

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
        is_reproducible: Callable[[TokenSequence], bool],
        saved: SavedStates | None = None,
    ) -> None:
        """Create a proposer without copies of sequences.

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
        self._followers: dict[TokenSequence, TokenSequence] = {}
        self._num_saved: dict[TokenSequence, int] = {}  # tokens in a follower's saved states

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[Draft]:
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

    def forget(self, sequence: TokenSequence) -> None:
        """Free the pages of the draft model's copy of a sequence."""
        if follower := self._followers.pop(sequence, None):
            self._num_saved.pop(follower, None)
            self._draft.scheduler.remove(follower)

    def _fits(self, follower: TokenSequence, count: int) -> bool:
        """Return whether the draft model has capacity for a follower sequence.

        The vocabulary of the draft model may be padded less than the target's.
        """
        if self._saved is not None and follower.state_slot < 0:
            return False
        size = self._draft.model.config.vocab_size
        pending = follower.tokens(follower.num_computed, len(follower))
        return (
            len(follower) + count <= self._draft.runner.max_sequence_tokens and max(pending) < size
        )

    def _follower(self, sequence: TokenSequence) -> TokenSequence:
        """Return the draft model's copy of a sequence, updated to the sequence's tokens."""
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

    def _save_states(self, followers: list[TokenSequence]) -> None:
        """Save the recurrent states of followers that have not computed any draft token yet."""
        if self._saved is not None and followers:
            slots = [follower.state_slot for follower in followers]
            self._saved.save(self._draft.runner.states, slots)
            self._num_saved |= {follower: follower.num_computed for follower in followers}

    def _draw_tokens(
        self, sequences: list[TokenSequence], logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logits = logits[:, : self._vocab_size].float().to(self._device)
        if (missing := self._vocab_size - logits.shape[1]) > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        batch = sampling_batch(sequences, self._vocab_size, self._device)
        return self._sampling.draw(logits, batch)


_LENGTHS = (3, 2)  # n-gram lengths in the order in which they are tried


@dataclass(slots=True)
class _Index:
    """Index of a sequence's n-grams, with the position of each.

    Attributes:
        tokens: Tokens of the sequence that were indexed so far, and the newest one.
        ends: End of the last occurrence of each n-gram, without the one at the end of the sequence.
        num_indexed: Number of tokens with indexed n-grams.
    """

    tokens: list[int]
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0

    def grow(self, sequence: TokenSequence) -> None:
        """Add n-grams of the tokens that were appended to the sequence."""
        self.tokens += sequence.tokens(len(self.tokens), len(sequence))
        for end in range(self.num_indexed + 1, len(self.tokens)):
            for length in _LENGTHS:
                if end >= length:
                    self.ends[tuple(self.tokens[end - length : end])] = end
        # The n-gram at the end is the one to look up, so it is indexed with the next token.
        self.num_indexed = len(self.tokens) - 1

    def following(self, count: int) -> tuple[int, ...]:
        """Return ``count`` tokens after the longest n-gram that occurred before; () without one.

        If fewer tokens followed, the tokens are repeated.
        """
        for length in _LENGTHS:
            start = self.ends.get(tuple(self.tokens[-length:]))
            if start is not None:
                period = self.tokens[start:]
                tokens = (period[place % len(period)] for place in range(count))
                # Encoded tokens of the prompt are not in the vocabulary.
                return tuple(takewhile(lambda token: token < FIRST_VIRTUAL_ID, tokens))
        return ()


class NgramProposer(Proposer):
    """Proposes tokens by prompt lookup: the tokens after an earlier occurrence of an n-gram."""

    def __init__(self) -> None:
        self._indices: dict[TokenSequence, _Index] = {}

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[Draft]:
        """Return the tokens after an earlier occurrence of the newest n-gram; see ``Proposer``."""
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            index = self._indices.setdefault(sequence, _Index([]))
            index.grow(sequence)
            drafts.append(Draft(index.following(count)))
        return drafts

    def forget(self, sequence: TokenSequence) -> None:
        """Drop the n-gram index of a sequence."""
        self._indices.pop(sequence, None)
