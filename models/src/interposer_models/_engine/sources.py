"""The sources of an encoder-decoder: each is encoded once, and read by the steps of its sequence.

Dimensions: E tokens of the sources, B sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from interposer import AttentionBackend, AttentionBatch, AttentionSpec
from interposer.errors import RequestError
from interposer_models._engine.pages import PagePool
from interposer_models._engine.request_batch import checked_tokens
from interposer_models._engine.sequence import Sequence as Request


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Whole sources, one behind the other.

    Attributes:
        token_ids, positions: ``[E]`` int64; a position is within the source.
        starts: ``[B + 1]`` int64; source b goes from entry b to before entry b + 1.
        longest: the most tokens of a source.
    """

    token_ids: Tensor
    positions: Tensor
    starts: Tensor
    longest: int


class SourceModel(Protocol):
    """A ``PagedModel`` whose layers attend to a source, in what it has besides."""

    @property
    def max_source_tokens(self) -> int:
        """The longest source."""
        ...

    def encode(self, sources: SourceBatch, caches: Sequence[Any], plans: Sequence[Any]) -> None:
        """Compute sources and store what the layers that attend to them read of each.

        Args:
            caches: as a step gets them.
            plans: of the layers that attend to sources, in the places of the layers; each has the
                slots of the E tokens.
        """
        ...


class Sources:
    """Encodes the sources of sequences that begin, into pages that these hold already.

    Attributes:
        pool: of pages.
        longest: the most tokens of a source.
    """

    def __init__(
        self, model: Any, pool: PagePool, device: str, max_step_tokens: int, vocab_size: int
    ) -> None:
        self._model, self._device, self._vocab_size = model, device, vocab_size
        self._max_step_tokens = max_step_tokens
        self._backends: list[AttentionBackend] = [each.backend for each in model.attention_layers]
        self.pool = pool
        self.longest = pool.longest(min(model.max_source_tokens, max_step_tokens))

    def check(self, source: Sequence[int] | None) -> list[int]:
        """Return the ids of a source as plain integers.

        Raises: RequestError: there is none, or it is empty, holds an unknown token, or exceeds the
            encoder, a step or the cache.
        """
        if source is None:
            raise RequestError(
                "The model attends to a source, and none was given. "
                "Try: engine.add(prompt, params, source=token_ids)"
            )
        tokens = checked_tokens(source, self._vocab_size)
        most = self._model.max_source_tokens
        if len(tokens) > most:
            raise RequestError(
                f"The source has {len(tokens)} tokens, the encoder takes {most}. "
                f"Try: shorten it to {most}"
            )
        if len(tokens) > self._max_step_tokens:
            raise RequestError(
                f"The source has {len(tokens)} tokens, which an encoder computes in one step, and "
                f"max_step_tokens is {self._max_step_tokens}. "
                f"Try: load(..., max_step_tokens={len(tokens)})"
            )
        self.pool.check(len(tokens))
        return tokens

    def encode(
        self,
        sequences: Sequence[Request],
        caches: Sequence[Any],
        numerics: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Compute the sources of sequences and store them in their pages."""
        size = self.pool.page_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence in sequences:
            pages, places = sequence.source_pages, range(len(sequence.source))
            token_ids += sequence.source
            positions += places
            slots += [pages[p // size] * size + p % size for p in places]
        lengths = [len(sequence.source) for sequence in sequences]
        numbers = torch.tensor([token_ids, positions, slots]).to(self._device)
        starts = torch.tensor([0, *accumulate(lengths)]).to(self._device)
        batch = SourceBatch(numbers[0], numbers[1], starts, max(lengths))
        self._model.reserve_positions(batch.longest, self._device)
        written = _written(numbers[2])
        with numerics():
            plans: dict[AttentionBackend, Any] = {}
            for backend in self._backends:
                if backend not in plans:
                    plans[backend] = backend.plan(written) if sees_source(backend.spec) else None
            self._model.encode(batch, caches, [plans[backend] for backend in self._backends])


def sees_source(spec: AttentionSpec) -> bool:
    """Say whether what a spec's layer attends to is a source."""
    return spec.type == "encoder_decoder"


def reads_sources(model: Any) -> bool:
    """Say whether layers of a model attend to a source."""
    return any(sees_source(layer.backend.spec) for layer in model.attention_layers)


def _written(slots: Tensor) -> AttentionBatch:
    """Return the batch that has slots ``[E]`` to write to, and no sequence that reads."""
    return AttentionBatch(
        query_starts=slots.new_zeros(1),
        seq_lens=slots.new_empty(0),
        page_table=slots.new_empty(0, 1),
        slots=slots,
        max_query_tokens=1,
        max_seq_tokens=1,
    )
