"""A decoder of transformers where each sequence has a cache of its own.

It serves models that keep more than keys and values, or whose attention no paged backend computes.
The sequences of a step are computed one after the other, each by the model's own forward.

Dimensions: T tokens of the step, R rows whose logits are wanted, V vocabulary.
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
from interposer_models._adapt.cache import new_cache
from interposer_models._adapt.noise import alone, bound_of, distance, rounded
from interposer_models._adapt.paged_decoder import DecoderSizes
from interposer_models._adapt.paged_trial import FAILURES
from interposer_models._adapt.trial_length import further_tokens
from interposer_models._engine.batch import StepBatch
from interposer_models._engine.cache_shape import CacheGroup, CacheShape
from interposer_models._engine.paged_model import PagedLayer
from interposer_models._engine.pages import PagePool
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.scheduler import Chunk
from interposer_models._engine.sequence import Sequence as EngineSequence
from interposer_ops.layers.states import StateBatch, StateLayout

_CACHE_NAMES = ("past_key_values", "cache_params")
# Tokens of the prompt and of another sequence in each step of the trial.
_STEPS = ((5, 3), (4, 2), (1, 1), (1, 1), (1, 1), (1, 0))


class _Slots:
    """The state layer by which the engine gives each running sequence a number."""

    def state_layout(self) -> StateLayout:
        """Return one byte, which nobody reads."""
        return StateLayout((((1,), torch.uint8),))


class SequenceCaches:
    """The ``PagedModel`` of a model of transformers whose sequences have caches of transformers.

    Attributes:
        by_token: what follows the first tokens of a sequence is computed one token at a time.
        by_model: the model makes the caches itself, as they are of a class of its own.
        pool: gives out the numbers of sequences; without its number, a cache is dropped.
    """

    attention_layers: ClassVar[Sequence[PagedLayer]] = ()
    page_size: ClassVar[int] = 16  # tokens that the engine counts together; no memory has pages
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
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), "")
        self._takes_positions = "position_ids" in parameters
        self._keeps_rows = "logits_to_keep" in parameters

    def reserve_positions(self, count: int, device: str) -> None:
        """Do nothing: the model makes the angles of each step itself."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return ``[R, V]``, the logits of the tokens that ``rows`` names in order, or of all."""
        if not self._in_force():
            raise ConfigError("The model was restored. Try: language_model(adapt(model))")
        batch: StateBatch = plans[-1].on_host()
        for slot in self._unused():
            del self._caches[slot]
        starts, wanted = batch.query_starts.tolist(), None if rows is None else rows.tolist()
        results: list[Tensor] = []
        for number, slot in enumerate(batch.slots.tolist()):
            start, stop = starts[number], starts[number + 1]
            num_cached = int(batch.num_cached[number])
            if num_cached == 0:
                self._caches[slot] = None if self.by_model else new_cache(self.model.config)
            own = slice(start, stop)
            kept: Sequence[int] = range(stop - start)
            if wanted is not None:
                kept = [row - start for row in wanted if start <= row < stop]
            logits = self._extended(slot, token_ids[own], positions[own], num_cached, kept)
            results.append(logits if len(kept) else logits[:0])
        return torch.cat(results)

    def num_bytes(self, slot: int) -> int:
        """Return the bytes of keys, values and states that a sequence has."""
        return sum(tensor.nbytes for tensor in _tensors(self._caches[slot]))

    def _unused(self) -> list[int]:
        free = () if self.pool is None else self.pool.free_slots
        return [slot for slot in free if slot in self._caches]

    def _extended(
        self, slot: int, tokens: Tensor, positions: Tensor, num_cached: int, kept: Sequence[int]
    ) -> Tensor:
        """Return the logits of the tokens that ``kept`` names, after adding all to the cache."""
        if self.by_token and num_cached:
            each = [
                self._forward(slot, tokens[i : i + 1], positions[i : i + 1], [0])
                for i in range(len(tokens))
            ]
            return torch.cat([each[i] for i in kept]) if kept else each[-1]
        return self._forward(slot, tokens, positions, kept)

    def _forward(self, slot: int, tokens: Tensor, positions: Tensor, kept: Sequence[int]) -> Tensor:
        named: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if (cache := self._caches[slot]) is not None:
            named[self._cache_name] = cache
        if self._takes_positions:
            named["position_ids"] = positions[None]
        rows = torch.tensor([*kept] or [len(tokens) - 1], device=tokens.device)
        if self._keeps_rows:
            named["logits_to_keep"] = rows
        out = self.model(input_ids=tokens[None], **named)
        if self.by_model:
            self._caches[slot] = out[self._cache_name]
        logits: Tensor = out.logits[0]
        return logits if self._keeps_rows else logits[rows]


def sequence_caches(
    model: nn.Module,
    config: DecoderSizes,
    device: str,
    numerics: Callable[[], AbstractContextManager[None]],
    in_force: Callable[[], bool],
) -> tuple[SequenceCaches, CacheShape, int] | None:
    """Return a decoder that computes what the model computes without a cache, if there is one.

    A prompt is computed in chunks and token by token, beside another sequence. The logits must be
    those of the model without a cache, within what roundings explain.

    Returns: the decoder, what a token takes in its caches, and the bytes that a sequence takes
        whatever its length; None where caches change what the model computes.
    """
    further, _ = further_tokens(model)
    (count, other), *others = _STEPS
    steps = ((count + further, other), *others)
    num_tokens = min(sum(count for count, _ in steps), config.max_position_embeddings)
    prompt = [(7 * i + 3) % config.vocab_size for i in range(num_tokens)]
    with numerics(), torch.inference_mode():
        expected = alone(model, prompt, device)
        bound = bound_of(model, expected, rounded(model, prompt, device), 0)
        for by_model, by_token in product((False, True), repeat=2):
            ways = {"by_token": by_token, "by_model": by_model}
            decoder = SequenceCaches(model, config, in_force, **ways)
            try:
                found, sizes = _in_steps(decoder, prompt, steps, device)
            except FAILURES:
                continue
            if distance(found, expected) <= bound:
                (first, first_bytes), (last, last_bytes) = sizes
                of_token = -(-(last_bytes - first_bytes) // max(last - first, 1))
                group = CacheGroup(None, 1, of_token * decoder.page_size, None)
                fixed = max(first_bytes - first * of_token, 0)
                return (
                    SequenceCaches(model, config, in_force, **ways),
                    CacheShape([group], decoder.page_size),
                    fixed,
                )
    return None


def _in_steps(
    decoder: SequenceCaches, prompt: list[int], steps: Sequence[tuple[int, int]], device: str
) -> tuple[Tensor, tuple[tuple[int, int], tuple[int, int]]]:
    """Return ``[T, V]`` of the prompt, and its tokens and bytes after the first and last step."""
    vocabulary = decoder.config.vocab_size
    other = [(5 * i + 1) % vocabulary for i in range(sum(count for _, count in steps))]
    other = other[: decoder.config.max_position_embeddings]
    pool = PagePool(2 * -(-max(len(prompt), len(other)) // decoder.page_size), decoder.page_size)
    pair = [EngineSequence(i, each, SamplingParams(), 0) for i, each in enumerate((prompt, other))]
    for slot, sequence in enumerate(pair):
        sequence.state_slot = slot
    found, sizes = list[Tensor](), list[tuple[int, int]]()
    for number, wanted in enumerate(steps):
        chunks = []
        for sequence, count in zip(pair, wanted, strict=True):
            left = min(count, len(sequence) - sequence.num_computed)
            if left > 0:
                pool.extend(sequence.pages[0], sequence.num_computed + left)
                chunks.append(Chunk(sequence, left))
        if not chunks:
            break
        if number % 2:
            chunks.reverse()
        batch = StepBatch.build(chunks, decoder.page_size, device, with_states=True)
        plan = StateBatch.of(batch.attention)
        logits = decoder(batch.token_ids, batch.positions, [], [plan])
        place = 0
        for chunk in chunks:
            if chunk.sequence is pair[0]:
                found.append(logits[place : place + chunk.num_tokens])
            place += chunk.num_tokens
            chunk.sequence.num_computed += chunk.num_tokens
        sizes.append((pair[0].num_computed, decoder.num_bytes(0)))
    return torch.cat(found), (sizes[0], sizes[-1])


def _tensors(cache: Any) -> Iterable[Tensor]:
    """Return what the layers of a cache hold: keys and values, or states in lists by number."""
    found: dict[tuple[int, torch.Size], Tensor] = {}
    for layer in getattr(cache, "layers", None) or [cache]:
        held = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for value in vars(layer).values():
            held += value.values() if isinstance(value, dict) else [value]
        for each in held:
            if isinstance(each, Tensor):
                found[each.data_ptr(), each.shape] = each
    return found.values()
