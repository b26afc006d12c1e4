"""A transformers decoder in which each sequence has its own transformers cache.

This decoder serves models with other state than keys and values, or with an attention that no paged
backend supports. The model's own forward computes the sequences of a step one after the other.

Dimensions: T tokens of the step, R rows with requested logits, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interposer.errors import ConfigError
from interposer_adapt._agreement import distance, error_bound, perturbed_logits, plain_logits
from interposer_adapt._cache_argument import cache_argument
from interposer_adapt._caches import new_cache
from interposer_adapt._paged_decoder import FAILURES, DecoderSizes
from interposer_adapt._trial_length import extra_trial_tokens
from interposer_engine import SamplingParams
from interposer_engine.parts import (
    CacheGroup,
    CacheShape,
    Chunk,
    PagedLayer,
    PagePool,
    StepBatch,
    TokenSequence,
)
from interposer_ops.layers.states import StateBatch, StateLayout

# Tokens of the prompt and of a second sequence in each step of the trial.
_STEPS = ((5, 3), (4, 2), (1, 1), (1, 1), (1, 1), (1, 0))


class _Slots:
    """Placeholder for a recurrent layer, so that the engine assigns a slot to each sequence."""

    def state_layout(self) -> StateLayout:
        """Return the layout of a state of one unused byte."""
        return StateLayout((((1,), torch.uint8),))


class SequenceCaches:
    """The engine's interface ``PagedModel``, with a transformers cache for each sequence.

    Attributes:
        by_token: tokens after the first chunk of a sequence are computed one at a time.
        by_model: the model creates the caches, of a class of the model.
        pool: assigns slots to sequences; the cache of a free slot is dropped.
    """

    attention_layers: ClassVar[Sequence[PagedLayer]] = ()
    page_size: ClassVar[int] = 16  # only a unit of the engine's token counts: nothing is paged
    pool: PagePool | None = None

    def __init__(
        self,
        model: nn.Module,
        config: DecoderSizes,
        in_force: Callable[[], bool],
        *,
        by_token: bool,
        by_model: bool,
    ) -> None:
        self.model: Any = model
        self.config = config
        self.by_token, self.by_model = by_token, by_model
        self.state_layers = [_Slots()]
        self._in_force = in_force
        self._caches: dict[int, Any] = {}
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model.forward)
        self._takes_positions = "position_ids" in parameters
        self._has_logits_to_keep = "logits_to_keep" in parameters

    def reserve_positions(self, count: int, device: str) -> None:
        """Do nothing: the model's forward computes the rotary angles of each step."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits ``[R, V]`` of the tokens in ``rows``, in order, or of all tokens."""
        if not self._in_force():
            raise ConfigError("The model was restored. Try: language_model(adapt(model))")
        # Slots and lengths are read on the host, as each sequence is a call of its own.
        batch: StateBatch = plans[-1].on_host()
        for slot in self._free_slots():
            del self._caches[slot]
        starts = batch.query_starts.tolist()
        requested_rows = None if rows is None else rows.tolist()
        results: list[Tensor] = []
        for number, slot in enumerate(batch.slots.tolist()):
            start, stop = starts[number], starts[number + 1]
            num_cached = int(batch.num_cached[number])
            if num_cached == 0:
                self._caches[slot] = None if self.by_model else new_cache(self.model.config)
            tokens = slice(start, stop)
            sequence_rows: Sequence[int] = range(stop - start)
            if requested_rows is not None:
                sequence_rows = [row - start for row in requested_rows if start <= row < stop]
            logits = self._extend(
                slot, token_ids[tokens], positions[tokens], num_cached, sequence_rows
            )
            results.append(logits if len(sequence_rows) else logits[:0])
        return torch.cat(results)

    def num_bytes(self, slot: int) -> int:
        """Return the number of bytes of the sequence's keys, values and states."""
        return sum(tensor.nbytes for tensor in _tensors(self._caches[slot]))

    def _free_slots(self) -> list[int]:
        free = () if self.pool is None else self.pool.free_slots
        return [slot for slot in free if slot in self._caches]

    def _extend(
        self, slot: int, tokens: Tensor, positions: Tensor, num_cached: int, rows: Sequence[int]
    ) -> Tensor:
        """Append tokens to a sequence's cache, and return the logits of the tokens in ``rows``."""
        if self.by_token and num_cached:
            token_logits = [
                self._forward(slot, tokens[i : i + 1], positions[i : i + 1], [0])
                for i in range(len(tokens))
            ]
            return torch.cat([token_logits[i] for i in rows]) if rows else token_logits[-1]
        return self._forward(slot, tokens, positions, rows)

    def _forward(
        self, slot: int, tokens: Tensor, positions: Tensor, requested_rows: Sequence[int]
    ) -> Tensor:
        kwargs: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if (cache := self._caches[slot]) is not None:
            kwargs[self._cache_argument] = cache
        if self._takes_positions:
            kwargs["position_ids"] = positions[None]
        rows = torch.tensor([*requested_rows] or [len(tokens) - 1], device=tokens.device)
        if self._has_logits_to_keep:
            kwargs["logits_to_keep"] = rows
        out = self.model(input_ids=tokens[None], **kwargs)
        if self.by_model:
            self._caches[slot] = out[self._cache_argument]
        logits: Tensor = out.logits[0]
        return logits if self._has_logits_to_keep else logits[rows]


def sequence_caches(
    model: nn.Module,
    config: DecoderSizes,
    device: str,
    numerics: Callable[[], AbstractContextManager[None]],
    in_force: Callable[[], bool],
) -> tuple[SequenceCaches, CacheShape, int] | None:
    """Return a decoder with transformers caches whose logits agree with the model's, or None.

    A prompt is computed in chunks and token by token, next to a second sequence. The logits must
    agree within the bound that rounding explains.

    Returns: the decoder, the cache shape of a token, and the constant bytes of a sequence.
    """
    extra_tokens, _ = extra_trial_tokens(model)
    (count, second), *later_steps = _STEPS
    steps = ((count + extra_tokens, second), *later_steps)
    num_tokens = min(sum(count for count, _ in steps), config.max_position_embeddings)
    prompt = [(7 * i + 3) % config.vocab_size for i in range(num_tokens)]
    with numerics(), torch.inference_mode():
        expected = plain_logits(model, prompt, device)
        max_distance = error_bound(model, expected, perturbed_logits(model, prompt, device), 0)
        # The first working combination is used; it starts with new_cache and whole chunks.
        for by_model, by_token in product((False, True), repeat=2):
            options = {"by_token": by_token, "by_model": by_model}
            decoder = SequenceCaches(model, config, in_force, **options)
            try:
                actual, sizes = _logits_in_steps(decoder, prompt, steps, device)
            except FAILURES:
                continue
            if distance(actual, expected) <= max_distance:
                # A line through both measurements: slope per token, constant part for states.
                (first, first_bytes), (last, last_bytes) = sizes
                token_bytes = -(-(last_bytes - first_bytes) // max(last - first, 1))
                group = CacheGroup(None, 1, token_bytes * decoder.page_size, None)
                constant_bytes = max(first_bytes - first * token_bytes, 0)
                return (
                    SequenceCaches(model, config, in_force, **options),
                    CacheShape([group], decoder.page_size),
                    constant_bytes,
                )
    return None


def _logits_in_steps(
    decoder: SequenceCaches, prompt: list[int], steps: Sequence[tuple[int, int]], device: str
) -> tuple[Tensor, tuple[tuple[int, int], tuple[int, int]]]:
    """Return a prompt's logits ``[T, V]``, and the cache sizes after the first and last step."""
    vocabulary = decoder.config.vocab_size
    second_prompt = [(5 * i + 1) % vocabulary for i in range(sum(count for _, count in steps))]
    second_prompt = second_prompt[: decoder.config.max_position_embeddings]
    pool = PagePool(
        2 * -(-max(len(prompt), len(second_prompt)) // decoder.page_size), decoder.page_size
    )
    sequences = [
        TokenSequence(i, tokens, SamplingParams(), 0)
        for i, tokens in enumerate((prompt, second_prompt))
    ]
    for slot, sequence in enumerate(sequences):
        sequence.state_slot = slot
    step_logits, sizes = list[Tensor](), list[tuple[int, int]]()
    for number, step_tokens in enumerate(steps):
        chunks = []
        for sequence, count in zip(sequences, step_tokens, strict=True):
            num_tokens = min(count, len(sequence) - sequence.num_computed)
            if num_tokens > 0:
                pool.extend(sequence.pages[0], sequence.num_computed + num_tokens)
                chunks.append(Chunk(sequence, num_tokens))
        if not chunks:
            break
        if number % 2:
            chunks.reverse()
        batch = StepBatch.build(chunks, decoder.page_size, device, with_states=True)
        plan = StateBatch.of(batch.attention)
        logits = decoder(batch.token_ids, batch.positions, [], [plan])
        row = 0
        for chunk in chunks:
            if chunk.sequence is sequences[0]:
                step_logits.append(logits[row : row + chunk.num_tokens])
            row += chunk.num_tokens
            chunk.sequence.num_computed += chunk.num_tokens
        sizes.append((sequences[0].num_computed, decoder.num_bytes(0)))
    return torch.cat(step_logits), (sizes[0], sizes[-1])


def _tensors(cache: Any) -> Iterable[Tensor]:
    """Return the tensors in a cache's layers: keys and values, or states in dicts by number."""
    tensors: dict[tuple[int, torch.Size], Tensor] = {}
    for layer in getattr(cache, "layers", None) or [cache]:
        values = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for value in vars(layer).values():
            values += value.values() if isinstance(value, dict) else [value]
        for element in values:
            if isinstance(element, Tensor):
                tensors[element.data_ptr(), element.shape] = element
    return tensors.values()
