"""Attention layers with interleaved rotary embedding, or without rotary embedding."""

from __future__ import annotations

from torch import Tensor

from interposer import PluggableLayer, Site
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.rotary import rotary_embedding_interleaved


class Unrotated(RotaryEmbedding):
    """A rotary layer that returns queries and keys unchanged (NoPE)."""

    def __init__(self, site: Site, head_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return query, key


class UnrotatedAttention(SelfAttention):
    """Attention without rotary embedding (NoPE); only the causal mask knows positions."""

    rotary_type = Unrotated


class InterleavedRotary(RotaryEmbedding):
    """Rotary embedding of adjacent elements (2i, 2i + 1), not of the two halves of a head."""

    def __init__(self, site: Site, head_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)
        # Skips RotaryEmbedding.__init__, which would bind the kernel that rotates halves.
        sizes = {"head_size": head_size, "rotary_size": rotary_size}
        self.rotate = site.bind(rotary_embedding_interleaved, **sizes)


class InterleavedAttention(SelfAttention):
    """Attention with ``InterleavedRotary``."""

    rotary_type = InterleavedRotary
