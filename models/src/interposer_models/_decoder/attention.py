"""Attention that rotates queries and keys in other ways than Llama's, or not at all."""

from __future__ import annotations

from torch import Tensor

from interposer import PluggableLayer, Site
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.rotary import rotary_embedding_interleaved


class Unrotated(RotaryEmbedding):
    """Leave queries and keys as they are."""

    def __init__(self, site: Site, head_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ``query`` and ``key``."""
        return query, key


class UnrotatedAttention(SelfAttention):
    """Attention that knows no positions but by what each token sees."""

    rotary_type = Unrotated


class InterleavedRotary(RotaryEmbedding):
    """Rotate neighbours among the elements of a head, not its halves."""

    def __init__(self, site: Site, head_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)
        sizes = {"head_size": head_size, "rotary_size": rotary_size}
        self.rotate = site.bind(rotary_embedding_interleaved, **sizes)


class InterleavedAttention(SelfAttention):
    """Attention with rotated neighbours."""

    rotary_type = InterleavedRotary
