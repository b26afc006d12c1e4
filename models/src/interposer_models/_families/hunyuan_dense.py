"""Hunyuan: Llama with norms of queries and keys, head by head, after they are rotated.

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
    """Attention with norms of query and key heads after the rotation."""

    def __init__(
        self, site: Site, spec: AttentionSpec, sizes: tuple[int, int], eps: float, bias: bool
    ) -> None:
        super().__init__(site, spec, *sizes, None, bias, bias)
        self.query_layernorm = RMSNorm(site.at("query_layernorm"), spec.head_size, eps)
        self.key_layernorm = RMSNorm(site.at("key_layernorm"), spec.head_size, eps)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query ``[T, N, D]``, key and value ``[T, K, D]``, ready for the attention."""
        query, key, value = super().heads(x, cos, sin)
        return self.query_layernorm(query), self.key_layernorm(key), value


class HunYuanDenseV1(DecoderFamily):
    """Hunyuan without experts."""

    rms_norm_eps: Epsilon = 1e-5

    def rotation(self, index: int) -> tuple[float, dict[str, Any]]:
        """Return base and scaling of the angles; a stated ``alpha`` raises the base once for all.

        Source: the NTK-aware base of arXiv:2309.00071, section 3.1.
        """
        base, scaling = super().rotation(index)
        alpha = scaling.get("alpha")
        if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not alpha:
            return base, scaling
        size = self.head_size
        return base * float(alpha) ** (size / (size - 2)), {}

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Return attention with norms after the rotation."""
        sizes = self.hidden_size, self.rotary_size
        return LateNormAttention(site, spec, sizes, self.rms_norm_eps, self.attention_bias)
