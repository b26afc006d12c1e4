"""ERNIE 4.5: Llama with interleaved rotary embedding.

Source: ERNIE 4.5 Technical Report, Baidu, 2025.
"""

from __future__ import annotations

from pydantic import AliasChoices, Field
from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.attention import InterleavedAttention
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon, Positive, RopeBase
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention


class Ernie4_5(DecoderFamily):
    """ERNIE 4.5, the dense models."""

    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 500000.0
    head_dim: Positive | None = 128
    tie_word_embeddings: bool = True
    attention_bias: bool = Field(
        default=False, validation_alias=AliasChoices("use_bias", "attention_bias")
    )

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention with interleaved rotation."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return InterleavedAttention(site, spec, *sizes, None, bias, bias)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MLP below a block's site."""
        sizes = self.hidden_size, self.intermediate_size
        # One field, use_bias, is for attention and MLP alike.
        return GatedMLP(block.at("mlp"), *sizes, self.hidden_act, self.attention_bias)
