"""The indexer of sparse attention, which selects the tokens that each token attends to.

Dimensions: T tokens, H hidden size, Q latent size of queries, I heads, D head size, R rotary size,
X selected tokens.

Source: DeepSeek-V3.2-Exp technical report. The published program multiplies queries and keys by a
Hadamard matrix, which does not change the dot products, and rounds both to 8 bits. This module
does neither.
"""

from __future__ import annotations

from torch import Tensor

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.layer_norm import LayerNorm
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.wide_linear import WideLinear

_EPS = 1e-6


class Indexer(PluggableLayer):
    """The projections of an indexer, and the backend that caches the indexer's keys.

    Args:
        spec: of type ``indexer``.
        rotary_size: R; the first R elements of queries and keys are rotated, by halves.
    """

    def __init__(
        self, site: Site, spec: AttentionSpec, hidden: int, query_latent: int, rotary_size: int
    ) -> None:
        super().__init__(site)
        heads, size = spec.num_heads, spec.head_size
        self.num_heads = heads
        self.wq_b = Linear(site.at("wq_b"), query_latent, heads * size)
        self.wk = Linear(site.at("wk"), hidden, size)
        self.k_norm = LayerNorm(site.at("k_norm"), size, _EPS)
        self.weights_proj = WideLinear(site.at("weights_proj"), hidden, heads)
        self.rotary = RotaryEmbedding(site.at("rotary"), size, rotary_size)
        self.attn = Attention(site.at("attn"), spec)
        self.scale = (heads * size) ** -0.5

    def forward(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, plan: object
    ) -> Tensor:
        """Select positions ``[T, X]`` int32 within each token's sequence; -1 is padding.

        Args:
            x: ``[T, H]``.
            latent: ``[T, Q]``, the latent queries of the attention that uses the selection.
            cos, sin: ``[T, R / 2]``.
        """
        # The indexer shares the latent queries with attention, but has its own up-projection.
        query = self.wq_b(latent).unflatten(-1, (self.num_heads, -1))
        key = self.k_norm(self.wk(x)).unsqueeze(1)
        query, key = self.rotary(query, key, cos, sin)
        # The score is a weighted sum of ReLUs over heads: a positive scale can be applied to the
        # weights instead of to every dot product.
        weights = self.weights_proj(x) * self.scale
        return self.attn(query, key, weights, cache, plan)  # type: ignore[no-any-return]
