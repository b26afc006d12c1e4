"""Settings of decoders with latent attention (MLA), which also build the decoder."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from interposer import AttentionSpec, Site
from interposer_models._decoder.grouped_mixture import GroupedFamily
from interposer_models._decoder.latent_attention import LatentAttention, LatentSizes
from interposer_models._decoder.settings import Positive
from interposer_ops.layers.self_attention import SelfAttention

_LARGEST_WIDTH = 2**24
_LARGEST_STRETCH = 2**24


class LatentFamily(GroupedFamily):
    """A decoder with latent attention and group-limited MoE layers."""

    # True only so that _sound_heads can refuse other values than 1 with its own error text.
    reads_partial_rotary_factor: ClassVar[bool] = True
    kv_lora_rank: Positive = 512
    q_lora_rank: Positive | None = 1536
    qk_nope_head_dim: Positive = 128
    qk_rope_head_dim: Positive = 64
    v_head_dim: Positive = 128
    moe_layer_freq: Literal[1] = 1
    n_shared_experts: Annotated[int, Field(gt=0, lt=2**16)] = 1

    @property
    def num_kv_heads(self) -> int:
        """One: all heads read the same latent vectors."""
        return 1

    @property
    def head_size(self) -> int:
        """Elements of a cached vector; ``head_dim`` of a config is only the rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        """Elements of each head that are rotated."""
        return self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """The factor of attention scores, with YaRN's correction for stretched contexts."""
        scale = float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)
        weight, factor = self._yarn_scale()
        # YaRN's attention scaling; squared, as it applies to queries and keys alike.
        if weight and factor > 1:
            scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
        return scale

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Describe the attention of layer ``index`` at a site."""
        spec = super().attention_spec(site, index, page_size)
        facts: dict[str, Any] = {"latent": True, "latent_size": self.kv_lora_rank}
        return replace(spec, scale=self.score_scale, **facts)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the attention of layer ``index`` at a site, with the projections."""
        head_sizes = self.q_lora_rank, self.qk_nope_head_dim, self.v_head_dim
        sizes = LatentSizes(self.hidden_size, *head_sizes)
        return LatentAttention(site, spec, sizes, self.interleaved, self.attention_bias)

    @property
    def interleaved(self) -> bool:
        """Adjacent elements are rotated, not the halves of the rotary part."""
        return True

    def _yarn_scale(self) -> tuple[float, float]:
        """Return YaRN's ``mscale_all_dim`` and ``factor``; 0 and 1 without scaling."""
        rope = self.rope_parameters
        if rope.get("rope_type", rope.get("type", "default")) == "default":
            return 0.0, 1.0
        numbers = []
        for name, default in (("mscale_all_dim", 0.0), ("factor", 1.0)):
            number = rope.get(name)
            number = default if number is None else number
            if type(number) not in (int, float) or not 0 <= number <= _LARGEST_STRETCH:
                raise ValueError(
                    f"{name} of rope_parameters is {number!r}, must be a number from 0 to "
                    f"{_LARGEST_STRETCH}"
                )
            numbers.append(float(number))
        return numbers[0], numbers[1]

    @model_validator(mode="after")
    def _sound_heads(self) -> Self:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads not in (None, heads):
            raise ValueError(
                f"num_key_value_heads {kv_heads} is not num_attention_heads {heads}, but latent "
                "attention makes keys for every head"
            )
        size = self.qk_nope_head_dim + max(self.qk_rope_head_dim, self.v_head_dim)
        if heads * size > _LARGEST_WIDTH:
            raise ValueError(f"{heads} heads of {size} are more than a model can have")
        if self.partial_rotary_factor != 1:
            raise ValueError(
                f"partial_rotary_factor is {self.partial_rotary_factor}, but qk_rope_head_dim "
                "states the rotated elements"
            )
        self._yarn_scale()
        return self
