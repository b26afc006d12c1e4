"""Phi-3: Llama whose checkpoints store Q, K and V as one matrix, and gate and up as one.

Source: arXiv:2404.14219.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import nn

from interposer import AttentionSpec, PluggableLayer, Site
from interposer.errors import UnsupportedModelError
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention


class StoredMergedAttention(SelfAttention):
    """Attention whose first projection is one tensor of the checkpoint."""

    def __init__(self, site: Site, spec: AttentionSpec, hidden_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        width, kv_width = spec.num_heads * size, spec.num_kv_heads * size
        self.sizes = (width, kv_width, kv_width)
        self.qkv_proj = MergedLinear(
            site.at("qkv_proj"), hidden_size, {"qkv_proj": sum(self.sizes)}
        )
        self.o_proj = Linear(site.at("o_proj"), width, hidden_size)
        self.q_norm = self.k_norm = None
        self.rotary = RotaryEmbedding(site.at("rotary"), size, rotary_size)
        self.attn = Attention(site.at("attn"), spec)


class StoredMergedMLP(GatedMLP):
    """A gated MLP whose first projection is one tensor of the checkpoint."""

    def __init__(self, site: Site, hidden_size: int, inner_size: int, activation: str) -> None:
        PluggableLayer.__init__(self, site)
        parts = {"gate_up_proj": 2 * inner_size}
        self.gate_up_proj = MergedLinear(site.at("gate_up_proj"), hidden_size, parts)
        self.activation = GatedActivation(site.at("activation"), activation, inner_size)
        self.down_proj = Linear(site.at("down_proj"), inner_size, hidden_size)


class Phi3(DecoderFamily):
    """Phi-3 and Phi-4 with one kind of angles for all lengths."""

    rms_norm_eps: Epsilon = 1e-5

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Return the settings of config.json; angles that change with the length are refused."""
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
        if kind in ("longrope", "su"):
            raise UnsupportedModelError(
                source,
                f"rope_type {kind!r} has other angles for long sequences, which is not computed",
                "another checkpoint of the model, with the short context",
            )
        return super().parse(config, source)

    def slides(self, index: int) -> bool:
        """Say that every layer has the window, if there is one."""
        return True

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Return the attention at a site, its projections included."""
        return StoredMergedAttention(site, spec, self.hidden_size, self.rotary_size)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the MLP below a block's site."""
        sizes = self.hidden_size, self.intermediate_size
        return StoredMergedMLP(block.at("mlp"), *sizes, self.hidden_act)
