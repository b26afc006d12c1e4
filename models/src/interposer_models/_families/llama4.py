"""Llama 4: chunked attention in rotated layers, temperature-scaled queries in others, MoE.

Source: ai.meta.com/blog/llama-4-multimodal-intelligence; scaled queries arXiv:2501.19399.
Dimensions: T tokens, N heads, K kv heads, D head size, H hidden size, C chosen experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, ExpertsSpec, Site
from interposer_models._decoder.attention import InterleavedAttention, Unrotated, UnrotatedAttention
from interposer_models._decoder.chunked_attention import chunk_layers
from interposer_models._decoder.decoder import CausalLM, Decoder
from interposer_models._decoder.moe import GroupedRouter, Grouping, MixtureFamily, count_of_experts
from interposer_models._decoder.settings import Epsilon, Positive, RopeBase
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.moe.sharded_experts import shard_experts
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention


class UnitNorm(RMSNorm):
    """Scales rows to unit root mean square; checkpoints have no weight for this norm."""

    def __init__(self, site: Site, hidden_size: int, eps: float) -> None:
        super().__init__(site, hidden_size, eps)
        # The loader fills the weight with 1, as no checkpoint contains the tensor.
        self.weight.default = 1.0  # type: ignore[attr-defined]


class UnitAttention(InterleavedAttention):
    """Self-attention with interleaved rotation, then queries and keys of unit root mean square."""

    def __init__(
        self, site: Site, spec: AttentionSpec, sizes: tuple[int, int], eps: float, bias: bool
    ) -> None:
        super().__init__(site, spec, *sizes, None, bias, bias)
        self.query_unit = UnitNorm(site.at("query_unit"), spec.head_size, eps)
        self.key_unit = UnitNorm(site.at("key_unit"), spec.head_size, eps)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query ``[T, N, D]``, key and value ``[T, K, D]``, rotated and then normed."""
        query, key, value = super().heads(x, cos, sin)
        return self.query_unit(query), self.key_unit(key), value


class TemperatureScaling(Unrotated):
    """Multiplies the queries of each token by a factor, in place of rotary embedding."""

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Multiply ``query`` ``[T, N, D]`` by the factors in ``cos`` ``[T, 1]``; keep ``key``."""
        return (query * cos[..., None]).to(query.dtype), key


class TemperatureAttention(SelfAttention):
    """Self-attention without rotation, with a query scale that grows with the position."""

    rotary_type = TemperatureScaling


class InputScaledMoE(nn.Module):
    """MoE layer that multiplies expert inputs by router scores, with a shared expert."""

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        super().__init__()
        grouping = Grouping(renormalize=False, scoring="sigmoid")
        self.top_k = spec.top_k
        self.router = GroupedRouter(site.at("router"), spec, grouping, "")
        # Scores scale inputs, so each (token, expert) pair is a row with a single expert.
        self.experts = shard_experts(site.at("experts"), replace(spec, top_k=1))
        sizes = spec.hidden_size, spec.intermediate_size, spec.activation
        self.shared_expert = GatedMLP(site.at("shared_expert"), *sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the chosen experts and the shared expert, ``[T, H]``."""
        scores, ids = self.router(x)  # [T, C]
        scaled = (x[:, None] * scores[..., None].to(x.dtype)).flatten(0, 1)
        # One row per token and chosen expert, with weight 1: the scores are in the inputs already.
        routed = self.experts(scaled, torch.ones_like(scores).reshape(-1, 1), ids.reshape(-1, 1))
        return routed.view(-1, self.top_k, x.shape[-1]).sum(1) + self.shared_expert(x)  # type: ignore[no-any-return]


class Llama4Decoder(Decoder):
    """Decoder in which layers without rotation get query scaling factors instead of angles."""

    config: Llama4

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute rotary angles and query factors for at least ``count`` positions."""
        super().reserve_positions(count, device)
        config, rows = self.config, len(self.tables[0][0])
        steps = torch.floor(torch.arange(1, rows + 1, dtype=torch.float32) / config.floor_scale)
        # The query temperature of each position, which grows with the logarithm of the position.
        factors = 1 + config.attn_scale * torch.log1p(steps)
        self.factors = factors[:, None].to(device)

    def angles(self, positions: Tensor) -> list[tuple[Tensor | None, Tensor | None]]:
        """Look up each layer's cosines, or query factors, and sines, ``[T, D / 2]``."""
        rotary_angles, factors = super().angles(positions), self.factors[positions]
        is_rotated = self.config.rotates
        return [
            pair if is_rotated(index) else (factors, pair[1])
            for index, pair in zip(self.block_indices, rotary_angles, strict=True)
        ]


class Llama4LM(CausalLM):
    """A ``Llama4Decoder`` with an LM head."""

    decoder_type = Llama4Decoder


class Llama4(MixtureFamily):
    """Settings of Llama 4's text model, which also build the decoder."""

    reads_layer_types: ClassVar[bool] = True
    num_key_value_heads: Positive | None = 8
    head_dim: Positive | None = 128
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 500000.0
    num_local_experts: Positive | None = count_of_experts(16)
    num_experts_per_tok: Positive | None = 1
    intermediate_size: Positive = 8192
    intermediate_size_mlp: Positive = 16384
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: Positive = 1
    use_qk_norm: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: Positive = 4
    attention_chunk_size: Annotated[int, Field(gt=0, lt=2**31)] | None = 8192
    layer_types: tuple[Literal["full_attention", "chunked_attention"], ...] | None = None  # type: ignore[assignment]
    attn_temperature_tuning: bool = True
    floor_scale: Annotated[float, Field(gt=0)] = 8192
    attn_scale: Annotated[float, Field(ge=0)] = 0.1

    def rotates(self, index: int) -> bool:
        """Say whether layer ``index`` applies rotary embedding; most layers do."""
        # 1 means that the layer does rotate, despite the field's name.
        if self.no_rope_layers:
            return bool(self.no_rope_layers[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def is_chunked(self, index: int) -> bool:
        """Say whether tokens of layer ``index`` attend only within chunks of the sequence."""
        if self.attention_chunk_size is None:
            return False
        if self.layer_types is not None:
            return self.layer_types[index] == "chunked_attention"
        return self.rotates(index)

    def has_experts(self, index: int) -> bool:
        """Say whether layer ``index`` is an MoE layer, not a dense MLP."""
        if self.moe_layers is not None:
            return index in self.moe_layers
        return (index + 1) % self.interleave_moe_layer_step == 0

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with rotary embedding, or with temperature-scaled queries."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        if self.rotates(index) and self.use_qk_norm:
            return UnitAttention(site, spec, sizes, self.rms_norm_eps, bias)
        unrotated_class = (
            TemperatureAttention if self.attn_temperature_tuning else UnrotatedAttention
        )
        attention_class = InterleavedAttention if self.rotates(index) else unrotated_class
        return attention_class(site, spec, *sizes, None, bias, bias)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer of layer ``index``, or a dense MLP."""
        site, size = block.at("feed_forward"), self.intermediate_size_mlp
        if self.has_experts(index):
            return InputScaledMoE(site, self.experts(inputs_first=True))
        return GatedMLP(site, self.hidden_size, size, self.hidden_act)

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head, and chunked attention in some layers."""
        size = self.attention_chunk_size
        model = Llama4LM(site, self, lambda at, i: self.block(at, i, page_size), self.norm)
        # A chunk as long as the context is plain causal attention.
        if size is not None and size < self.max_position_embeddings:
            layers = enumerate(model.attention_layers)
            chunk_layers((layer for i, layer in layers if self.is_chunked(i)), size)
        return model

    @model_validator(mode="after")
    def _check_num_flags(self) -> Self:
        flags = self.no_rope_layers
        if flags and len(flags) != self.num_hidden_layers:
            raise ValueError(f"no_rope_layers has {len(flags)} of {self.num_hidden_layers} layers")
        return self
