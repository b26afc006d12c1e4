"""Llama and close relatives: Mistral, Mixtral, Ministral, Ministral 3 and SmolLM3.

Llama has pre-norm RMSNorm, rotary embedding, grouped-query attention and a gated SiLU MLP. Mistral
adds a sliding window, Ministral full attention in some layers, and Mixtral MoE layers. Ministral 3
scales the queries of late positions. SmolLM3 has no rotary embedding in every fourth layer.

Source: arXiv:2302.13971, arXiv:2307.09288 and arXiv:2407.21783 (Llama 1 to 3), arXiv:2310.06825
(Mistral), arXiv:2401.04088 (Mixtral), mistral.ai/news/ministraux, mistral.ai/news/mistral-3,
arXiv:2501.19399 (scaled queries), huggingface.co/blog/smollm3, arXiv:2501.18795 (layers without
rotation).

Dimensions: T tokens, N heads, K kv heads, D head size, R rotary size.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.attention import UnrotatedAttention
from interposer_models._decoder.decoder import CausalLM, Decoder
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Epsilon, Positive, RopeBase, WindowTokens
from interposer_ops.layers.self_attention import SelfAttention

_MINISTRAL_3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


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


class PositionScaledAttention(SelfAttention):
    """Self-attention whose queries are multiplied by a factor of their position."""

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the scaled query ``[T, N, D]``, key and value ``[T, K, D]``.

        Args:
            cos: ``[T, R / 2 + 1]``; the last column holds the factors.
        """
        query, key, value = super().heads(x, cos[:, :-1].contiguous(), sin)
        return query * cos[:, -1, None, None].to(query.dtype), key, value


class PositionScaledDecoder(Decoder):
    """Decoder that gives each layer the factors of queries in one more column of the cosines."""

    config: Ministral3

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute rotary angles and factors of queries for at least ``count`` positions."""
        super().reserve_positions(count, device)
        beta, length = self.config.query_scaling
        cos, sin = self.tables[0]
        rounds = torch.floor(torch.arange(len(cos), device=cos.device) / length)
        factors = 1 + beta * torch.log1p(rounds)
        self.tables = [(torch.cat((cos, factors[:, None].to(cos.dtype)), 1), sin)]


class PositionScaledLM(CausalLM):
    """A ``PositionScaledDecoder`` with an LM head."""

    decoder_type = PositionScaledDecoder


class Ministral3(Mistral):
    """Settings of Ministral 3, which also build the decoder.

    The queries at position p are multiplied by 1 + beta * ln(1 + floor(p / L)), where beta is
    ``llama_4_scaling_beta`` and L the original context length of ``rope_parameters``.
    """

    head_dim: Positive | None = 128
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 1000000.0

    @property
    def query_scaling(self) -> tuple[float, float]:
        """The numbers beta and L."""
        rope = self.rope_parameters
        return rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with scaled queries."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return PositionScaledAttention(site, spec, *sizes, None, bias, bias)

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head."""
        return PositionScaledLM(
            site, self, lambda at, index: self.block(at, index, page_size), self.norm
        )

    @model_validator(mode="before")
    @classmethod
    def _default_rotation(cls, fields: Any) -> Any:
        """Add the rotary scaling of transformers to a config that states none."""
        if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
            return {**fields, "rope_parameters": _MINISTRAL_3_ROPE}
        return fields

    @model_validator(mode="after")
    def _check_query_scaling(self) -> Self:
        for name in ("llama_4_scaling_beta", "original_max_position_embeddings"):
            value = self.rope_parameters.get(name)
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"{name} of rope_parameters is {value!r}, must be above 0")
        return self


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
