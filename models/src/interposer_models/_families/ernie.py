"""ERNIE 4.5: Llama with interleaved rotary embedding, as dense or MoE models.

Source: ERNIE 4.5 Technical Report, Baidu, 2025.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AliasChoices, Field, model_validator
from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.attention import InterleavedAttention
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import GroupedMoE, Grouping, MixtureFamily
from interposer_models._decoder.settings import Epsilon, Positive, RopeBase
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention


class Ernie4_5(DecoderFamily):
    """Settings of ERNIE 4.5's dense models, which also build the decoder."""

    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 500000.0
    head_dim: Positive | None = 128
    tie_word_embeddings: bool = True
    attention_bias: bool = Field(
        default=False, validation_alias=AliasChoices("use_bias", "attention_bias")
    )

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with interleaved rotary embedding."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return InterleavedAttention(site, spec, *sizes, None, bias, bias)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the gated MLP of a decoder block."""
        sizes = self.hidden_size, self.intermediate_size
        # One field, use_bias, is for attention and MLP alike.
        return GatedMLP(block.at("mlp"), *sizes, self.hidden_act, self.attention_bias)


_BIAS = "moe_statics.e_score_correction_bias"


class Ernie4_5_Moe(MixtureFamily, Ernie4_5):
    """Settings of ERNIE 4.5's MoE models, which also build the decoder."""

    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 500000.0
    head_dim: Positive | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = Field(
        default=False, validation_alias=AliasChoices("use_bias", "attention_bias")
    )
    num_local_experts: Positive | None = Field(
        default=64,
        validation_alias=AliasChoices("moe_num_experts", "num_local_experts", "num_experts"),
    )
    num_experts_per_tok: Positive | None = Field(
        default=6, validation_alias=AliasChoices("moe_k", "num_experts_per_tok")
    )
    moe_intermediate_size: Positive = 1536
    moe_num_shared_experts: Annotated[int, Field(ge=0, lt=2**16)] = 2
    moe_layer_start_index: Annotated[int, Field(ge=0)] = 1
    moe_layer_end_index: Annotated[int, Field(ge=-1)] = -1
    moe_layer_interval: Positive = 1

    @property
    def expert_size(self) -> int:
        """Intermediate size of an expert; dense layers have ``intermediate_size``."""
        return self.moe_intermediate_size

    def has_experts(self, index: int) -> bool:
        """Say whether layer ``index`` is an MoE layer, not a dense MLP."""
        # -1 means the last layer.
        last = self.moe_layer_end_index
        last = self.num_hidden_layers - 1 if last == -1 else last
        regular = (index + 1) % self.moe_layer_interval == 0
        return regular and self.moe_layer_start_index <= index <= last

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer of layer ``index``, or a dense MLP."""
        if not self.has_experts(index):
            return super().mlp(block, index)
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        shared = self.moe_num_shared_experts * self.moe_intermediate_size
        grouping = Grouping(scoring="softmax")
        moe = GroupedMoE(block.at("mlp"), experts, grouping, shared, _BIAS)
        bias = moe.router.e_score_correction_bias
        assert bias is not None
        bias.data = bias.data[None]  # checkpoints store [1, E]
        return moe

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder without the MTP layers of the checkpoint."""
        model = super().build(site, page_size)
        model.unread = ("model.mtp_", "mtp_")
        return model

    @model_validator(mode="after")
    def _no_biases(self) -> Self:
        if self.attention_bias:
            raise ValueError("use_bias is true, but shared experts are computed without biases")
        return self
