"""Qwen2-MoE: Qwen2 with many small experts and a gated shared expert.

Source: arXiv:2407.10671.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from interposer import AttentionSpec, ExpertsSpec, Site
from interposer_models._decoder.mixture import MixtureMLP, SparseFamily, count_of_experts
from interposer_models._decoder.settings import Positive
from interposer_models._families.qwen2 import Qwen2
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention


class GatedSharedExpertMoE(MixtureMLP):
    """An MoE layer with a shared expert, which a learned sigmoid gate per token scales."""

    def __init__(self, site: Site, spec: ExpertsSpec, shared: int, renormalize: bool) -> None:
        super().__init__(site, spec, "gate", renormalize)
        self.shared_expert = GatedMLP(site.at("shared_expert"), spec.hidden_size, shared, "silu")
        self.shared_expert_gate = Linear(site.at("shared_expert_gate"), spec.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        # The gate is one number per token.
        shared: Tensor = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return super().forward(x) + shared


class Qwen2Moe(SparseFamily, Qwen2):
    """Qwen1.5-MoE and Qwen2-57B-A14B."""

    num_local_experts: Positive | None = count_of_experts(60)
    num_experts_per_tok: Positive | None = 4
    moe_intermediate_size: Positive = 1408
    shared_expert_intermediate_size: Positive = 5632
    qkv_bias: bool = True
    # Configs state 0 if windows are not used.
    sliding_window: Annotated[int, Field(ge=0, lt=2**31)] | None = 4096

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has the window: every second one of the lower layers."""
        return self.use_sliding_window and index % 2 == 0 and index < self.max_window_layers

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention with an optional QKV bias."""
        return SelfAttention(site, spec, self.hidden_size, self.rotary_size, None, self.qkv_bias)

    def mixture(self, site: Site, experts: ExpertsSpec) -> nn.Module:
        """Build the MoE layer with a shared expert."""
        shared = self.shared_expert_intermediate_size
        return GatedSharedExpertMoE(site, experts, shared, self.norm_topk_prob)
