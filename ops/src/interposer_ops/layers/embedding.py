"""Token embedding and language model head, which may share one table.

Dimensions: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Call, EmbeddingMethod, PluggableLayer, Site
from interposer.errors import ConfigError
from interposer_ops.embedding._embedding import embedding
from interposer_ops.layers.linear import PlainLinear
from interposer_ops.linear._linear import linear

__all__ = ["Embedding", "LMHead", "PlainEmbedding"]


class PlainEmbedding(EmbeddingMethod):
    """Unquantized table: ``weight`` ``[V, H]`` in the model's dtype."""

    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register the table ``weight`` ``[V, H]``, and bind the lookup and any tied head."""
        table = {"vocab_size": vocab_size, "hidden_size": hidden_size, "tied": False}
        sizes = {"in_features": hidden_size, "out_features": vocab_size, "biased": False}
        self.lookup, self.product = site.bind_table(embedding, table, linear, sizes, head)
        weight = torch.empty(vocab_size, hidden_size, dtype=site.dtype)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return the bound kernels with the table, prepared if the kernels require preparation."""
        weight = layer.get_parameter("weight")
        looked_up = self.lookup.prepared(weight=weight)["weight"]
        lookup: Call = self.lookup.function, (looked_up,)
        head_call: Call | None = None
        if self.product is not None:
            prepared = self.product.prepared(weight=weight, bias=None)
            head_call = self.product.function, (prepared["weight"], prepared["bias"])
        if looked_up is not weight:
            # The kernel keeps its own prepared copy; the original would double the memory.
            layer.register_parameter("weight", None)
        return lookup, head_call


class Embedding(PluggableLayer):
    """Look up token embeddings; the checkpoint's quantization scheme decides the storage format.

    ``head`` is the site of the language model head that shares the table, or None.
    """

    layer_id = "embedding"

    def __init__(
        self, site: Site, vocab_size: int, hidden_size: int, head: Site | None = None
    ) -> None:
        super().__init__(site)
        self._create(site, vocab_size, hidden_size, head)

    def _create(self, site: Site, vocab_size: int, hidden_size: int, head: Site | None) -> None:
        scheme = site.resolver.scheme
        shared_by = None if head is None else head.prefix
        method = scheme.embedding_method(site.prefix, shared_by) if scheme else None
        self.method = method or PlainEmbedding()
        self.method.create_weights(self, site, vocab_size, hidden_size, head)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.is_tied = head is not None
        self.lookup: Callable[..., Tensor] | None = None
        self.constants: tuple[Any, ...] = ()
        # Kernel and operands of a head that shares the table.
        self.head_call: Call | None = None

    def finalize(self) -> None:
        """Let the embedding method turn the loaded table into the kernels' operands."""
        (self.lookup, self.constants), self.head_call = self.method.finalize(self)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up the embeddings ``[T, H]`` of ``token_ids`` ``[T]``."""
        return self.lookup(token_ids, *self.constants)  # type: ignore[misc]


class LMHead(PluggableLayer):
    """Project hidden states to logits; the quantization scheme decides how the weight is stored.

    ``tied`` is the embedding whose table the head shares, built with this head's site, or None.
    """

    layer_id = "lm_head"

    def __init__(
        self, site: Site, vocab_size: int, hidden_size: int, tied: Embedding | None = None
    ) -> None:
        super().__init__(site)
        self._create(site, vocab_size, hidden_size, tied)

    def _create(
        self, site: Site, vocab_size: int, hidden_size: int, tied: Embedding | None
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self._kernel: Callable[..., Tensor] | None = None
        self._operands: tuple[Any, ...] = ()
        # A tuple hides the module from torch's child modules.
        self._tied = () if tied is None else (tied,)
        if tied is None:
            scheme = site.resolver.scheme
            self.method = (scheme.head_method(site.prefix) if scheme else None) or PlainLinear()
            self.method.create_weights(self, site, hidden_size, vocab_size, bias=False)
            return
        if not tied.is_tied:
            raise ConfigError(
                f"{site.prefix} is tied to {tied.prefix}, which was built without a head. "
                "Try: Embedding(site, vocab_size, hidden_size, head=the site of the head)"
            )
        # The head registers the same parameters, so the loader fills the table once under either
        # name.
        for name, parameter in tied._parameters.items():
            self.register_parameter(name, parameter)

    @property
    def kernel(self) -> Callable[..., Tensor] | None:
        """The kernel called with hidden states and ``operands``; None before ``finalize``."""
        return self._call[0]

    @property
    def operands(self) -> tuple[Any, ...]:
        """The prepared weight and the kernel's other constants."""
        return self._call[1]

    def finalize(self) -> None:
        """Let the linear method prepare an untied weight; the embedding prepares a tied weight."""
        if self._tied:
            for name in list(self._parameters):
                self.register_parameter(name, None)
        else:
            self._kernel, self._operands = self.method.finalize(self)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project ``hidden`` ``[T, H]`` to logits ``[T, V]``."""
        kernel, operands = self._call
        return kernel(hidden, *operands)  # type: ignore[misc]

    @property
    def _call(self) -> tuple[Callable[..., Tensor] | None, tuple[Any, ...]]:
        for embedding_of_both in self._tied:
            return embedding_of_both.head_call or (None, ())
        return self._kernel, self._operands
