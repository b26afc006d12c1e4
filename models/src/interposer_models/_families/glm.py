"""GLM-4 and GLM-4.5: rotary embedding of half of each head.

GLM-4-0414 has norms before and after each sublayer, and interleaved rotation. GLM-4.5 has
bias-balanced experts and a shared expert in all layers but the first.

Source: arXiv:2406.12793 (GLM-4; the norms came with GLM-4-0414), arXiv:2508.06471 (GLM-4.5).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.attention import InterleavedAttention
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import GroupedFamily, count_of_routed_experts
from interposer_models._decoder.settings import Epsilon, Positive
from interposer_models._families.phi3 import StoredMergedMLP
from interposer_ops.layers.self_attention import SelfAttention

# Despite its name, post_attention_layernorm comes before the MLP.
NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


class Glm4(DecoderFamily):
    """Settings of GLM-4-0414, whose checkpoints store gate and up projections as one tensor."""

    reads_partial_rotary_factor: ClassVar[bool] = True
    rms_norm_eps: Epsilon = 1.5625e-7
    head_dim: Positive | None = 128
    attention_bias: bool = True
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with interleaved rotation, without bias in the output projection."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return InterleavedAttention(site, spec, *sizes, None, bias)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the gated MLP, whose gate and up projections checkpoints store as one tensor."""
        sizes = self.hidden_size, self.intermediate_size
        return StoredMergedMLP(block.at("mlp"), *sizes, self.hidden_act)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with norms before and after both attention and MLP."""
        return self.normed_block(site, index, page_size, NORMS)


class Glm4Moe(GroupedFamily):
    """Settings of GLM-4.5 and GLM-4.6, which also build the decoder."""

    reads_partial_rotary_factor: ClassVar[bool] = True
    rms_norm_eps: Epsilon = 1e-5
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    use_qk_norm: bool = False
    num_local_experts: Positive | None = count_of_routed_experts(128)
    num_experts_per_tok: Positive | None = 8
    moe_intermediate_size: Positive = 1408
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 1

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention without an output bias; larger models have per-head norms."""
        eps = self.rms_norm_eps if self.use_qk_norm else None
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return SelfAttention(site, spec, *sizes, eps, bias)
