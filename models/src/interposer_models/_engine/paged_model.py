"""The part of a model that the engine calls, whoever wrote the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from interposer import AttentionBackend


class Sizes(Protocol):
    """The two sizes by which requests are checked."""

    @property
    def vocab_size(self) -> int:
        """The number of logits of a token."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """The context."""
        ...


class PagedLayer(Protocol):
    """One attention layer."""

    @property
    def backend(self) -> AttentionBackend:
        """The backends that attend; layers with equal specs share it."""
        ...


class PagedModel(Protocol):
    """A decoder that keeps its state in caches, and in nothing else.

    What it has besides is its ``state_layers``, as those of a ``CausalModel``; without the
    attribute it has none. One whose layers attend to a source is a ``SourceModel``, too.
    """

    @property
    def config(self) -> Sizes:
        """The sizes of the model."""
        ...

    @property
    def attention_layers(self) -> Sequence[PagedLayer]:
        """The attention layers in order; cache i belongs to layer i."""
        ...

    def reserve_positions(self, count: int, device: str) -> None:
        """Prepare for ``count`` positions at least; what was prepared already stays in place."""
        ...

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the tokens that ``rows`` names, or of all; see ``CausalLM``."""
        ...
