"""Qwen2 and Qwen3, as dense decoders or with many small experts.

Qwen2 is Llama with biases of queries, keys and values, and windows in the upper layers. Qwen2-MoE
adds a gated shared expert. Qwen3 has per-head norms of queries and keys before the rotation instead
of the biases. Qwen3-MoE has experts in all layers or some.

Source: arXiv:2407.10671 (Qwen2), arXiv:2505.09388 (Qwen3).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from interposer import AttentionSpec, ExpertsSpec, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import MixtureMLP, SparseFamily, count_of_experts
from interposer_models._decoder.settings import Positive
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.moe.parts import MoEParts
from interposer_ops.layers.self_attention import SelfAttention


class Qwen2(DecoderFamily):
    """Settings of Qwen2 and Qwen2.5, which also build the decoder."""

    reads_layer_types: ClassVar[bool] = True
    switches_windows: ClassVar[bool] = True
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has a window: layer ``max_window_layers`` and all later."""
        return self.use_sliding_window and index >= self.max_window_layers

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with a QKV bias, whatever the config states."""
        sizes = self.hidden_size, self.rotary_size
        # Configs do not state the bias; every checkpoint has one for Q, K and V.
        return SelfAttention(site, spec, *sizes, None, True, self.attention_bias)


class Qwen3(DecoderFamily):
    """Settings of Qwen3's dense models, which also build the decoder."""

    reads_layer_types: ClassVar[bool] = True
    switches_windows: ClassVar[bool] = True
    head_dim: Positive | None = 128
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has a window: layer ``max_window_layers`` and all later."""
        return self.use_sliding_window and index >= self.max_window_layers

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with norms of query and key heads."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return SelfAttention(site, spec, *sizes, self.rms_norm_eps, bias, bias)


class GatedSharedExpertMoE(MixtureMLP):
    """MoE layer with a shared expert that a learned sigmoid gate scales for each token."""

    def __init__(self, site: Site, spec: ExpertsSpec, shared: int, renormalize: bool) -> None:
        super().__init__(site, spec, "gate", renormalize)
        self.shared_expert = GatedMLP(site.at("shared_expert"), spec.hidden_size, shared, "silu")
        self.shared_expert_gate = Linear(site.at("shared_expert_gate"), spec.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        # The gate is one number per token.
        shared: Tensor = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return super().forward(x) + shared

    def moe_parts(self) -> MoEParts | None:
        if type(self) is not GatedSharedExpertMoE:
            return None
        shared = self.shared_expert, self.shared_expert_gate
        return MoEParts(self.router, self.experts, *shared)


class Qwen2Moe(SparseFamily, Qwen2):
    """Settings of Qwen1.5-MoE and Qwen2-57B-A14B, which also build the decoder."""

    num_local_experts: Positive | None = count_of_experts(60)
    num_experts_per_tok: Positive | None = 4
    moe_intermediate_size: Positive = 1408
    shared_expert_intermediate_size: Positive = 5632
    qkv_bias: bool = True
    # Configs state 0 if windows are not used.
    sliding_window: Annotated[int, Field(ge=0, lt=2**31)] | None = 4096

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has a window: even layers below ``max_window_layers``."""
        return self.use_sliding_window and index % 2 == 0 and index < self.max_window_layers

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with an optional QKV bias."""
        return SelfAttention(site, spec, self.hidden_size, self.rotary_size, None, self.qkv_bias)

    def mixture(self, site: Site, experts: ExpertsSpec) -> nn.Module:
        """Build the MoE layer with a gated shared expert."""
        shared = self.shared_expert_intermediate_size
        return GatedSharedExpertMoE(site, experts, shared, self.norm_topk_prob)


class Qwen3Moe(SparseFamily, Qwen3):
    """Settings of Qwen3's MoE models, which also build the decoder."""

    # Unlike Qwen3, transformers ignores layer_types for this architecture.
    reads_layer_types: ClassVar[bool] = False
    head_dim: Positive | None = None
    num_local_experts: Positive | None = count_of_experts(128)
    num_experts_per_tok: Positive | None = 8

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has a sliding window: all layers, if windows are enabled."""
        return self.use_sliding_window
