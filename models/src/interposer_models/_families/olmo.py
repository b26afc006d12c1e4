"""OLMo 2 and 3: norms after attention and MLP, and norms over all query heads and all key heads.

OLMo 3 adds windows in three of four layers; only full layers have long-context angles.

Source: arXiv:2501.00656 (OLMo 2), arXiv:2512.13961 (OLMo 3).

Dimensions: T tokens, N heads, K kv heads, D head size.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon, LayerTypeBases, RopeBase, WindowTokens
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention

NORMS = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")


class WideNormAttention(SelfAttention):
    """Self-attention with one norm over all query heads, and one over all key heads."""

    # The reason, shown to users, for not sharding this attention among ranks.
    undivided = "one norm is over all heads"

    def __init__(
        self, site: Site, spec: AttentionSpec, sizes: tuple[int, int], eps: float, bias: bool
    ) -> None:
        super().__init__(site, spec, *sizes, None, bias, bias)
        width, kv_width, _ = self.sizes
        self.q_norm = RMSNorm(site.at("q_norm"), width, eps)
        self.k_norm = RMSNorm(site.at("k_norm"), kv_width, eps)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query ``[T, N, D]``, key and value ``[T, K, D]``, ready for the attention."""
        query, key, value = self.qkv_proj(x).split(self.sizes, dim=-1)
        # For the type checker: both always exist here.
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
        query, key, value = (x.unflatten(-1, (-1, self.head_size)) for x in (query, key, value))
        return (*self.rotary(query, key, cos, sin), value)


class Olmo2(DecoderFamily):
    """Settings of OLMo 2, which also build the decoder."""

    rms_norm_eps: Epsilon = 1e-5

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with a norm over all query heads, and one over all key heads."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return WideNormAttention(site, spec, sizes, self.rms_norm_eps, bias)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with norms after attention and after the MLP."""
        return self.normed_block(site, index, page_size, NORMS)


class Olmo3(Olmo2):
    """Settings of OLMo 3, which also build the decoder."""

    reads_layer_types: ClassVar[bool] = True
    # Only full-attention layers may scale; the base is the same.
    layer_type_bases: ClassVar[LayerTypeBases | None] = LayerTypeBases(500000.0, 500000.0)
    rope_theta: RopeBase = 500000.0
    sliding_window: WindowTokens | None = 4096

    def slides(self, index: int) -> bool:
        """Return True if layer ``index`` has a sliding window: all layers but every fourth."""
        return (index + 1) % 4 != 0
