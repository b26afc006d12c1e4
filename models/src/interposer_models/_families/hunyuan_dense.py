"""Hunyuan: Llama with per-head norms of queries and keys after the rotation.

Source: huggingface.co/tencent/Hunyuan-7B-Instruct.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from interposer import AttentionSpec, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention


class LateNormAttention(SelfAttention):
    """Attention with norms of query and key heads after the rotation.

    Dimensions: T tokens, N heads, K kv heads, D head size.
    """

    def __init__(
        self, site: Site, spec: AttentionSpec, sizes: tuple[int, int], eps: float, bias: bool
    ) -> None:
        super().__init__(site, spec, *sizes, None, bias, bias)
        self.query_layernorm = RMSNorm(site.at("query_layernorm"), spec.head_size, eps)
        self.key_layernorm = RMSNorm(site.at("key_layernorm"), spec.head_size, eps)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query ``[T, N, D]``, key and value ``[T, K, D]``, ready for the attention."""
        query, key, value = super().heads(x, cos, sin)
        return self.query_layernorm(query), self.key_layernorm(key), value


class HunYuanDenseV1(DecoderFamily):
    """Hunyuan, the dense models."""

    rms_norm_eps: Epsilon = 1e-5

    def rotation(self, index: int) -> tuple[float, dict[str, Any]]:
        """Return rotary base and scaling; ``alpha`` raises the base for all sequence lengths.

        Source: the NTK-aware base of arXiv:2309.00071, section 3.1.
        """
        base, scaling = super().rotation(index)
        alpha = scaling.get("alpha")
        if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not alpha:
            return base, scaling
        # "dynamic" is dropped: with alpha, the base does not depend on the sequence length.
        size = self.head_size
        return base * float(alpha) ** (size / (size - 2)), {}

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention with norms after the rotation."""
        sizes = self.hidden_size, self.rotary_size
        return LateNormAttention(site, spec, sizes, self.rms_norm_eps, self.attention_bias)
