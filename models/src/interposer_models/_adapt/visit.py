"""The visit: one call of a model whose attention and masks go to a visitor instead.

It concerns the thread that opens it, and all models that this thread calls until it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from interposer import AttentionBackend

MakeMask = Callable[..., Tensor | None]


class Asked(NamedTuple):
    """One call of the attention, as transformers makes it.

    Attributes:
        query: ``[B, N, T, D]``; key and value are alike.
        options: what else the module says, such as ``softcap``.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    is_causal: bool | None
    options: Mapping[str, Any]


Paged = tuple[AttentionBackend, Tensor, object]
"""A backend with the cache of a layer and the plan of the step."""


class Visitor(Protocol):
    """A stand-in for the attention of a model."""

    def attend(self, asked: Asked) -> Tensor:
        """Return ``[B, T, N, E]``."""
        ...

    def pages(self, module: nn.Module) -> Paged | None:
        """Return what ``module`` attends over, None where it is to ask for its attention."""
        ...

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return the mask of these settings, by ``make`` or not."""
        ...


VISITOR: ContextVar[Visitor | None] = ContextVar("interposer_visitor", default=None)


@contextmanager
def visited_by(visitor: Visitor) -> Iterator[None]:
    """Let ``visitor`` stand in within a ``with`` block."""
    token = VISITOR.set(visitor)
    try:
        yield
    finally:
        VISITOR.reset(token)
