"""Rotary position embedding of queries and keys. T tokens, N heads, K kv heads, D head size."""

from __future__ import annotations

from torch import Tensor

from interposer import PluggableLayer, Site
from interposer_ops.rotary._rotary import rotary_embedding

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(PluggableLayer):
    """Rotate queries and keys by cos/sin tables that the model looks up once per step."""

    layer_id = "rotary_embedding"

    def __init__(self, site: Site, head_size: int, rotary_size: int) -> None:
        super().__init__(site)
        self.rotate = site.bind(rotary_embedding, head_size=head_size, rotary_size=rotary_size)

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rotated ``query`` ``[T, N, D]`` and ``key`` ``[T, K, D]``."""
        return self.rotate(query, key, cos, sin)
