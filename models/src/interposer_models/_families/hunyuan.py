"""Hunyuan: Llama with per-head norms after the rotation, dense or with MoE layers.

Source: huggingface.co/tencent/Hunyuan-7B-Instruct, huggingface.co/tencent/Hunyuan-A13B-Instruct,
arXiv:2411.02265.
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, ExpertsSpec, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Epsilon, FieldError, Positive
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.moe.parts import MoEParts
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention


class LateNormAttention(SelfAttention):
    """Self-attention with norms of query and key heads after the rotation.

    Dimensions: T tokens, N heads, K kv heads, D head size.
    """

    def __init__(
        self, site: Site, spec: AttentionSpec, sizes: tuple[int, int], eps: float, bias: bool
    ) -> None:
        super().__init__(site, spec, *sizes, None, bias, bias)
        self.query_layernorm = RMSNorm(site.at("query_layernorm"), spec.head_size, eps)
        self.key_layernorm = RMSNorm(site.at("key_layernorm"), spec.head_size, eps)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query ``[T, N, D]``, key and value ``[T, K, D]``, normed after the rotation."""
        query, key, value = super().heads(x, cos, sin)
        return self.query_layernorm(query), self.key_layernorm(key), value


class HunYuanDenseV1(DecoderFamily):
    """Settings of Hunyuan's dense models, which also build the decoder."""

    rms_norm_eps: Epsilon = 1e-5

    def rotation(self, index: int) -> tuple[float, dict[str, Any]]:
        """Return the rotary base, raised by ``alpha`` for all sequence lengths, and the scaling.

        Source: the NTK-aware base of arXiv:2309.00071, section 3.1.
        """
        base, scaling = super().rotation(index)
        alpha = scaling.get("alpha")
        if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not alpha:
            return base, scaling
        # "dynamic" is dropped: with alpha, the base does not depend on the sequence length.
        size = self.head_size
        return base * float(alpha) ** (size / (size - 2)), {}

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with per-head norms after the rotation."""
        sizes = self.hidden_size, self.rotary_size
        return LateNormAttention(site, spec, sizes, self.rms_norm_eps, self.attention_bias)


# Fields that Hunyuan-A13B states as a list with one number per layer.
_PER_LAYER = ("moe_topk", "num_experts")


class SharedExpertMoE(MixtureMLP):
    """An MoE layer with a shared expert for all tokens."""

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        super().__init__(site, spec, "gate.wg", renormalize=True)
        sizes = spec.hidden_size, spec.intermediate_size
        self.shared_mlp = GatedMLP(site.at("shared_mlp"), *sizes, spec.activation)

    def forward(self, x: Tensor) -> Tensor:
        shared: Tensor = self.shared_mlp(x)
        return super().forward(x) + shared

    def moe_parts(self) -> MoEParts | None:
        if type(self) is not SharedExpertMoE:
            return None
        return MoEParts(self.router, self.experts, self.shared_mlp)


class HunYuanMoEV1(MixtureFamily, HunYuanDenseV1):
    """Settings of Hunyuan's MoE models, with the same number of experts in all layers."""

    rms_norm_eps: Epsilon = 1e-5
    num_local_experts: Positive | None = count_of_experts(1)
    num_experts_per_tok: Positive | None = Field(
        default=1, validation_alias=AliasChoices("moe_topk", "num_experts_per_tok")
    )

    @model_validator(mode="before")
    @classmethod
    def _merge_per_layer_numbers(cls, fields: Any) -> Any:
        """Merge lists of equal per-layer numbers to one number, as in Hunyuan-A13B's config."""
        merged = dict(fields)
        for name in _PER_LAYER:
            if not isinstance(values := merged.get(name), list):
                continue
            if not values or any(value != values[0] for value in values):
                raise FieldError(
                    f"{name} is {values!r:.100}, must be one number for all layers",
                    "load it by transformers, and interposer_adapt.adapt(model)",
                )
            merged[name] = values[0]
        return merged

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer with a shared expert."""
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        return SharedExpertMoE(block.at("mlp"), experts)
