"""The interface of a model that the engine can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from interposer import AttentionBackend


class Sizes(Protocol):
    """The sizes against which requests are checked."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Context length in tokens."""
        ...


class PagedLayer(Protocol):
    """One attention layer."""

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend; layers with equal specs share one backend."""
        ...


class PagedModel(Protocol):
    """A decoder with all state in KV caches and recurrent states.

    A model with recurrent layers has the attribute ``state_layers``, as a ``CausalModel``. A model
    that attends to an encoder input also implements ``SourceModel``.
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
        """Prepare at least ``count`` positions; memory that is large enough stays in place."""
        ...

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the tokens at ``rows``, or of all tokens; see ``CausalLM``."""
        ...
