"""Interception of a model's attention calls and masks during one forward pass.

An interceptor applies to the current thread: to all models that the thread calls while the ``with``
block is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from interposer import AttentionBackend

MakeMask = Callable[..., Tensor | None]


class AttentionCall(NamedTuple):
    """The arguments of one attention call, as transformers passes them.

    Attributes:
        query: ``[B, N, T, D]``; key and value have the same layout.
        options: the remaining keywords, such as ``softcap``.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    is_causal: bool | None
    options: Mapping[str, Any]


PagedCache = tuple[AttentionBackend, Tensor, object]
"""The backend of a layer, its KV cache and the plan of the step."""


class AttentionInterceptor(Protocol):
    """Replacement for the attention and mask functions of a model."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the attention of a call, ``[B, T, N, E]``."""
        ...

    def paged_cache(self, module: nn.Module) -> PagedCache | None:
        """Return the paged cache that a decoder block may use directly for ``module``.

        None makes the block call ``attend`` as usual.
        """
        ...

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return the mask for ``settings``; ``make(**settings)`` makes the regular mask."""
        ...


INTERCEPTOR: ContextVar[AttentionInterceptor | None] = ContextVar(
    "interposer_attention_interceptor", default=None
)


@contextmanager
def intercepted_by(interceptor: AttentionInterceptor) -> Iterator[None]:
    """Send attention calls and masks to ``interceptor`` within a ``with`` block."""
    token = INTERCEPTOR.set(interceptor)
    try:
        yield
    finally:
        INTERCEPTOR.reset(token)
