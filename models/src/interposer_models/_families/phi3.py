"""Phi-3: Llama whose checkpoints store Q, K and V as one matrix, and gate and up as one.

Source: arXiv:2404.14219; factors of long contexts arXiv:2402.13753.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon, Positive
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.divided_pairs import QKV, PairNames, share_heads, share_inner
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention

# Of the type that is longrope now.
_OLD_NAMES = ("su", "yarn")


class StoredMergedAttention(SelfAttention):
    """Attention whose first projection is one tensor of the checkpoint."""

    def __init__(self, site: Site, spec: AttentionSpec, hidden_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        names = PairNames("qkv_proj", "o_proj")
        stored = {"qkv_proj": [axis for axes in QKV.values() for axis in axes]}
        shares = share_heads(site, spec, hidden_size, names, stored)
        self.sizes = shares.sizes
        self.qkv_proj, self.o_proj = shares.first(), shares.last()
        self.q_norm = self.k_norm = None
        self.rotary = RotaryEmbedding(site.at("rotary"), size, rotary_size)
        self.attn = shares.attention(site.at("attn"))


class StoredMergedMLP(GatedMLP):
    """A gated MLP whose first projection is one tensor of the checkpoint."""

    def __init__(self, site: Site, hidden_size: int, inner_size: int, activation: str) -> None:
        PluggableLayer.__init__(self, site)
        names = PairNames("gate_up_proj", "down_proj")
        shares = share_inner(site, hidden_size, inner_size, names, {"gate_up_proj": 2})
        self.gate_up_proj = shares.first()
        self.activation = GatedActivation(site.at("activation"), activation, shares.size)
        self.down_proj = shares.last()


class Phi3(DecoderFamily):
    """Phi-3, Phi-4 and Phi-4-mini.

    Angles of long contexts have two sets of factors. All sequences get those of the context that
    the config states, which are the long ones where it is longer than the original context.
    """

    reads_partial_rotary_factor: ClassVar[bool] = True
    rms_norm_eps: Epsilon = 1e-5
    original_max_position_embeddings: Positive | None = 4096

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """``rope_type`` and its parameters."""
        stated = super().rope_scaling
        kind = stated.get("rope_type", stated.get("type"))
        return {**stated, "rope_type": "longrope"} if kind in _OLD_NAMES else stated

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
