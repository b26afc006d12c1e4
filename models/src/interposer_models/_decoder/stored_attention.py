"""Attention to the keys and values that an earlier layer stored.

Dimensions: T tokens, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from interposer import AttentionBackend, AttentionSpec, PluggableLayer, Site
from interposer_ops.layers.attention import Attention


class StoredAttention(PluggableLayer):
    """Attend to the cache of the last layer before with an equal spec, and write nothing."""

    def __init__(self, site: Site, spec: AttentionSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.backend: AttentionBackend = site.resolver.attention(spec, site)
        # In a tuple, so that it is no module of its own.
        self.source: tuple[Attention, ...] = ()

    def forward(self, query: Tensor, cache: Tensor, plan: object) -> Tensor:
        """Return ``[T, N, D]``; ``plan`` is the backend's for this step."""
        return self.backend.forward_stored(query, cache, plan, self.source[0].scales)


def find_sources(modules: Iterable[nn.Module]) -> None:
    """Tell each layer that attends to a stored cache whose it is.

    Args:
        modules: of a decoder, in the order of their layers.
    """
    written: dict[AttentionBackend, Attention] = {}
    for module in modules:
        if isinstance(module, Attention):
            written[module.backend] = module
        elif isinstance(module, StoredAttention):
            module.source = (written[module.backend],)
