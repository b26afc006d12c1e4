"""MiniMax-M2: bias-corrected expert choice; one norm over all query heads, one over all keys.

Source: huggingface.co/MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.moe import GroupedMoE, Grouping, MixtureFamily, count_of_experts
from interposer_models._decoder.settings import Positive, RopeBase
from interposer_models._families.olmo import WideNormAttention
from interposer_ops.layers.self_attention import SelfAttention


class MiniMaxM2(MixtureFamily):
    """Settings of MiniMax-M2, whose checkpoints store every expert separately."""

    reads_partial_rotary_factor: ClassVar[bool] = True
    head_dim: Positive | None = 128
    rope_theta: RopeBase = 5000000.0
    num_local_experts: Positive | None = count_of_experts(256)
    num_experts_per_tok: Positive | None = 8
    rotary_dim: Positive | None = None

    @property
    def rotary_size(self) -> int:
        """Number of rotated elements of each head."""
        return self.rotary_dim or super().rotary_size

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with a norm over all query heads, and one over all key heads."""
        sizes = self.hidden_size, self.rotary_size
        return WideNormAttention(site, spec, sizes, self.rms_norm_eps, bias=False)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer, whose router adds a correction bias to the expert scores."""
        experts = self.experts(projections=("w1", "w3", "w2"))
        moe_site, bias = block.at("block_sparse_moe"), "e_score_correction_bias"
        return GroupedMoE(moe_site, experts, Grouping(), 0, bias)
