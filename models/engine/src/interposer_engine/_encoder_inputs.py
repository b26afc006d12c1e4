"""Encoder inputs of encoder-decoders: encoded once, and attended to by all decoder steps.

Dimensions: E tokens of all encoder inputs of a batch, B encoder inputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from interposer import AttentionBackend, AttentionBatch, AttentionSpec
from interposer.errors import ConfigError, ContextLengthError, RequestError
from interposer_engine._encoder_features import EncoderFeatures, FeatureSource
from interposer_engine._pages import PagePool
from interposer_engine._sampling import checked_tokens
from interposer_engine._sequence import TokenSequence
from interposer_models.decoder import EncoderInputBatch

Source = Sequence[int] | EncoderFeatures
"""An encoder input: token ids, or features if the model has a ``feature_shape``."""


class EncoderModel(Protocol):
    """Interface that a ``PagedModel`` with an encoder has in addition.

    Attributes:
        feature_shape: Features of a frame and frames of an encoder input; None if the encoder
            reads token ids.
    """

    feature_shape: tuple[int, int] | None

    @property
    def max_source_tokens(self) -> int:
        """Largest number of tokens of an encoder input."""
        ...

    def encode(
        self, sources: EncoderInputBatch, caches: Sequence[Any], plans: Sequence[Any]
    ) -> None:
        """Encode inputs, and write the keys and values of the cross-attention layers to the caches.

        Args:
            caches: As in ``PagedModel.__call__``.
            plans: One per attention layer; plans of cross-attention layers have the slots of the E
                tokens.
        """
        ...


class EncoderInputs:
    """Encodes the inputs of new sequences into KV-cache pages that belong to the sequences.

    Attributes:
        pool: Page pool of the encoder inputs.
        longest: Largest number of tokens of an encoder input.
    """

    def __init__(
        self, model: Any, pool: PagePool, device: str, max_step_tokens: int, vocab_size: int
    ) -> None:
        self._model, self._device, self._vocab_size = model, device, vocab_size
        self._max_step_tokens = max_step_tokens
        self._backends: list[AttentionBackend] = [layer.backend for layer in model.attention_layers]
        self.pool = pool
        self.longest = pool.longest(min(model.max_source_tokens, max_step_tokens))
        self._feature_shape: tuple[int, int] | None = getattr(model, "feature_shape", None)
        if self._feature_shape is not None and self.longest < model.max_source_tokens:
            raise ConfigError(
                f"Every encoder input of the model has {model.max_source_tokens} positions, but "
                f"max_step_tokens and cache_tokens allow {self.longest}. "
                f"Try: load(..., max_step_tokens={model.max_source_tokens}), and cache_tokens of "
                "at least that number for each request that runs at the same time"
            )

    @property
    def reads_features(self) -> bool:
        """Whether encoder inputs are features instead of token ids."""
        return self._feature_shape is not None

    def example(self, token_ids: Sequence[int]) -> Source:
        """Return an encoder input for a trial run: zeros, or as many token ids as possible."""
        if self._feature_shape is None:
            return token_ids[: self.longest]
        return EncoderFeatures(torch.zeros(self._feature_shape))

    def check(self, source: Source | None) -> list[int] | FeatureSource:
        """Check an encoder input, and return token ids as plain integers, or the features.

        Raises: RequestError: the input is missing or empty, has an unknown token, exceeds the
            encoder, a step or the cache, or is of the kind that the encoder does not read.
        """
        if source is None:
            example = "token_ids" if self._feature_shape is None else "EncoderFeatures(values)"
            raise RequestError(
                "The model has an encoder, but no encoder input was given. "
                f"Try: engine.add(prompt, params, source={example})"
            )
        if self._feature_shape is not None:
            if not isinstance(source, EncoderFeatures):
                raise RequestError(
                    "The encoder of the model reads the features of a sound, no text or token ids. "
                    "Try: lm.transcribe(audio), or the command interposer transcribe"
                )
            return source.checked(self._feature_shape, self._model.max_source_tokens)
        if isinstance(source, EncoderFeatures):
            raise RequestError(
                "The encoder of the model reads token ids, no features. "
                "Try: a text or token ids as the prompt"
            )
        tokens = checked_tokens(source, self._vocab_size)
        max_tokens = self._model.max_source_tokens
        if len(tokens) > max_tokens:
            raise ContextLengthError(
                f"The encoder input has {len(tokens)} tokens, the encoder takes {max_tokens}. "
                f"Try: shorten it to {max_tokens}"
            )
        if len(tokens) > self._max_step_tokens:
            raise ContextLengthError(
                f"The encoder input has {len(tokens)} tokens, which are computed in one step, but "
                f"max_step_tokens is {self._max_step_tokens}. "
                f"Try: load(..., max_step_tokens={len(tokens)})"
            )
        self.pool.check(len(tokens))
        return tokens

    def encode(
        self,
        sequences: Sequence[TokenSequence],
        caches: Sequence[Any],
        numerics: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Encode the inputs of sequences, and write keys and values to the cache pages.

        Inputs whose keys and values the cache holds, because of equal inputs, are left out.
        """
        by_key = {
            sequence.source_key: sequence
            for sequence in sequences
            if sequence.encoded is not None and not sequence.encoded.is_encoded
        }
        if by_key:
            self._encode([*by_key.values()], caches, numerics)
        for sequence in by_key.values():
            assert sequence.encoded is not None
            sequence.encoded.is_encoded = True

    def _encode(
        self,
        sequences: Sequence[TokenSequence],
        caches: Sequence[Any],
        numerics: Callable[[], AbstractContextManager[None]],
    ) -> None:
        size = self.pool.page_size
        token_ids: list[int] = []
        features: list[Tensor] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence in sequences:
            pages, source_positions = sequence.source_pages, range(len(sequence.source))
            if isinstance(sequence.source, FeatureSource):
                features.append(sequence.source.values)
                token_ids += [0] * len(sequence.source)
            else:
                token_ids += sequence.source
            positions += source_positions
            slots += [pages[p // size] * size + p % size for p in source_positions]
        lengths = [len(sequence.source) for sequence in sequences]
        device_values = torch.tensor([token_ids, positions, slots]).to(self._device)
        starts = torch.tensor([0, *accumulate(lengths)]).to(self._device)
        batch = EncoderInputBatch(
            device_values[0],
            device_values[1],
            starts,
            max(lengths),
            torch.stack(features).to(self._device) if features else None,
        )
        self._model.reserve_positions(batch.longest, self._device)
        write_batch = _write_batch(device_values[2])
        with numerics():
            plans: dict[AttentionBackend, Any] = {}
            for backend in self._backends:
                # Self-attention layers have other backends; the encoder writes nothing to their
                # caches.
                if backend not in plans:
                    plans[backend] = (
                        backend.plan(write_batch) if sees_source(backend.spec) else None
                    )
            self._model.encode(batch, caches, [plans[backend] for backend in self._backends])


def source_key(source: list[int] | FeatureSource, cache_salt: str, adapter: int | None) -> bytes:
    """Return a digest of a checked encoder input, by which sequences share its keys and values.

    Args:
        cache_salt: See ``SamplingParams``.
        adapter: Version number of the adapter, which changes keys and values; None without one.
    """
    content = array("q", source).tobytes() if isinstance(source, list) else source.content
    users = blake2b(f"{adapter} {cache_salt}".encode(), digest_size=16).digest()
    return blake2b(content, digest_size=16, key=users).digest()


def sees_source(spec: AttentionSpec) -> bool:
    """Return whether a layer with this spec attends to the encoder input."""
    return spec.type == "encoder_decoder"


def has_encoder_inputs(model: Any) -> bool:
    """Return whether the model has layers that attend to an encoder input."""
    return any(sees_source(layer.backend.spec) for layer in model.attention_layers)


def _write_batch(slots: Tensor) -> AttentionBatch:
    """Return a batch that only writes keys and values to ``slots`` ``[E]``, without queries."""
    return AttentionBatch(
        query_starts=slots.new_zeros(1),
        seq_lens=slots.new_empty(0),
        page_table=slots.new_empty(0, 1),
        slots=slots,
        max_query_tokens=1,
        max_seq_tokens=1,
    )
