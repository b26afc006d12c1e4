"""Token embedding and the language model head, which may share one weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interposer import PluggableLayer, Site
from interposer_ops.linear import embedding, linear

__all__ = ["Embedding", "LMHead"]


class Embedding(PluggableLayer):
    """Look up token embeddings, ``weight`` ``[V, H]``."""

    layer_id = "embedding"

    def __init__(self, site: Site, vocab_size: int, hidden_size: int) -> None:
        super().__init__(site)
        weight = torch.empty(vocab_size, hidden_size, dtype=site.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        dims = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        self._bound = site.bind_kernel(embedding, **dims)
        self.lookup = self._bound.function
        # In a tuple, so that it is no parameter of its own.
        self.constants: tuple[Any, ...] = (self.weight,)

    def finalize(self) -> None:
        """Prepare the weight for the kernel; the plain one stays for a tied head."""
        self.constants = (self._bound.prepared(weight=self.weight)["weight"],)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[T, H]`` of ``token_ids`` ``[T]``."""
        return self.lookup(token_ids, *self.constants)


class LMHead(PluggableLayer):
    """Project hidden states to logits, ``weight`` ``[V, H]``.

    ``tied`` is the embedding whose weight serves both, or None for a weight of its own.
    """

    layer_id = "lm_head"

    def __init__(
        self, site: Site, vocab_size: int, hidden_size: int, tied: Embedding | None = None
    ) -> None:
        super().__init__(site)
        self.weight = (
            tied.weight
            if tied is not None
            else nn.Parameter(
                torch.empty(vocab_size, hidden_size, dtype=site.dtype), requires_grad=False
            )
        )
        self._bound = site.bind_kernel(linear, in_features=hidden_size, out_features=vocab_size)
        self._tied = tied is not None
        self.operands: tuple[Any, ...] = ()
        self.kernel = self._bound.function

    def finalize(self) -> None:
        """Prepare the weight for the kernel; a tied one stays for the embedding besides."""
        prepared = self._bound.prepared(weight=self.weight, bias=None)
        self.operands = prepared["weight"], prepared["bias"]
        if not self._tied and self.operands[0] is not self.weight:
            del self.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[T, V]`` of ``hidden`` ``[T, H]``."""
        return self.kernel(hidden, *self.operands)
