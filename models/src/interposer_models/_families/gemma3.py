"""Gemma 3: Gemma 2 with per-head norms instead of soft caps; windowed layers rotate differently.

Source: arXiv:2503.19786.
"""

from __future__ import annotations

from typing import ClassVar

from interposer import AttentionSpec, Site
from interposer_models._decoder.rotary_fields import LayerTypeBases
from interposer_models._decoder.settings import Positive, RopeBase
from interposer_models._families.gemma2 import Cap, Gemma2
from interposer_ops.layers.norm import GemmaRMSNorm
from interposer_ops.layers.self_attention import SelfAttention


class GemmaAttention(SelfAttention):
    """Attention with Gemma's RMSNorm per head."""

    norm_type = GemmaRMSNorm


class Gemma3(Gemma2):
    """The decoder of Gemma 3; only full-attention layers have long-context angles."""

    # Windowed layers keep the short-context base.
    layer_type_bases: ClassVar[LayerTypeBases | None] = LayerTypeBases(
        1000000.0, 10000.0, "rope_local_base_freq"
    )
    attn_logit_softcapping: Cap | None = None
    final_logit_softcapping: Cap | None = None
    rope_theta: RopeBase = 1000000.0
    rope_local_base_freq: RopeBase = 10000.0
    # Five windowed layers, then a full one.
    sliding_window_pattern: Positive = 6

    def slides(self, index: int) -> bool:
        """Return True for all layers but every sixth."""
        return (index + 1) % self.sliding_window_pattern != 0

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention with per-head norms of queries and keys."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return GemmaAttention(site, spec, *sizes, self.rms_norm_eps, bias, bias)
