"""Llama and close relatives: Mistral, Mixtral, Ministral and SmolLM3.

Llama has pre-norm RMSNorm, rotary embedding, grouped-query attention and a gated SiLU MLP. Mistral
adds a sliding window, Ministral full attention in some layers, and Mixtral MoE layers. SmolLM3 has
no rotary embedding in every fourth layer.

Source: arXiv:2302.13971, arXiv:2307.09288 and arXiv:2407.21783 (Llama 1 to 3), arXiv:2310.06825
(Mistral), arXiv:2401.04088 (Mixtral), mistral.ai/news/ministraux, huggingface.co/blog/smollm3,
arXiv:2501.18795 (layers without rotation).
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.attention import UnrotatedAttention
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Epsilon, Positive, RopeBase, WindowTokens
from interposer_ops.layers.self_attention import SelfAttention


class Llama(DecoderFamily):
    """Settings of Llama 1 to 3 and models in its format, which also build the decoder."""


class Mistral(Llama):
    """Settings of Mistral; later releases without ``sliding_window`` use full attention."""

    def slides(self, index: int) -> bool:
        """Return True: every layer has a sliding window."""
        return True


class Ministral(Mistral):
    """Settings of Ministral, which also build the decoder.

    ``layer_types`` names the layers with a sliding window; if absent, all layers have one.
    """

    reads_layer_types: ClassVar[bool] = True
    sliding_window: WindowTokens | None = 4096


class Mixtral(MixtureFamily):
    """Settings of Mixtral, whose checkpoints store every expert separately."""

    num_local_experts: Positive | None = count_of_experts(8)
    num_experts_per_tok: Positive | None = 2
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 1e6

    def slides(self, index: int) -> bool:
        """Return True: every layer has a sliding window."""
        return True

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer, in which the weights of a token's experts sum to 1."""
        experts = self.experts(projections=("w1", "w3", "w2"))
        return MixtureMLP(block.at("block_sparse_moe"), experts, "gate", renormalize=True)


class SmolLM3(DecoderFamily):
    """Settings of SmolLM3, in which some layers have no rotary embedding."""

    reads_layer_types: ClassVar[bool] = True
    num_key_value_heads: Positive | None = 4
    rope_theta: RopeBase = 2000000.0
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: Positive = 4
    use_sliding_window: bool = False

    def rotates(self, index: int) -> bool:
        """Say whether layer ``index`` applies rotary embedding to queries and keys."""
        flags = self.no_rope_layers  # 1 means that the layer does rotate, despite the field's name
        if flags is not None and index < len(flags):
            return bool(flags[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has a sliding window."""
        # Windows are only in layers without rotation.
        return self.use_sliding_window and not self.rotates(index)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with or without rotary embedding."""
        if self.rotates(index):
            return super().self_attention(site, index, spec)
        bias = self.attention_bias
        return UnrotatedAttention(site, spec, self.hidden_size, self.rotary_size, None, bias, bias)
