"""Attention to the keys and values that an earlier layer cached.

Dimensions: T tokens, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from interposer import AttentionBackend, AttentionSpec, PluggableLayer, Site
from interposer_ops.layers.attention import Attention


class StoredAttention(PluggableLayer):
    """Attend to the cache of the latest earlier layer with an equal spec; write nothing."""

    def __init__(self, site: Site, spec: AttentionSpec) -> None:
        super().__init__(site)
        self.spec = spec
        self.backend: AttentionBackend = site.resolver.attention(spec, site)
        # In a tuple, so that torch does not register it as a submodule.
        self.cache_writer: tuple[Attention, ...] = ()

    def forward(self, query: Tensor, cache: Tensor, plan: object) -> Tensor:
        """Attend to the earlier layer's cache: ``[T, N, D]``.

        Args:
            plan: of the backend, for this step.
        """
        return self.backend.forward_stored(query, cache, plan, self.cache_writer[0].scales)


def connect_cache_readers(modules: Iterable[nn.Module]) -> None:
    """Connect each layer that reads another layer's cache to the layer that writes the cache.

    Args:
        modules: of a decoder, in layer order.
    """
    last_writers: dict[AttentionBackend, Attention] = {}
    for module in modules:
        if isinstance(module, Attention):
            last_writers[module.backend] = module
        elif isinstance(module, StoredAttention):
            module.cache_writer = (last_writers[module.backend],)
