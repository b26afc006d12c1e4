"""Phi-3: Llama whose Q, K and V are stored as one matrix, and gate and up as another.

Source: arXiv:2404.14219; factors of long contexts arXiv:2402.13753.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from interposer import AttentionSpec, PluggableLayer, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon, Positive
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.projection_pairs import (
    QKV,
    ProjectionNames,
    shard_attention,
    shard_mlp,
)

# Early names of the rope type longrope.
_OLD_NAMES = ("su", "yarn")


class StoredMergedAttention(SelfAttention):
    """Self-attention whose QKV projection is one tensor in checkpoints."""

    def __init__(self, site: Site, spec: AttentionSpec, hidden_size: int, rotary_size: int) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        names = ProjectionNames("qkv_proj", "o_proj")
        # One name for all three outputs, as the checkpoint has one tensor.
        checkpoint_outputs = {"qkv_proj": [axis for axes in QKV.values() for axis in axes]}
        shards = shard_attention(site, spec, hidden_size, names, checkpoint_outputs)
        self.sizes = shards.sizes
        self.qkv_proj, self.o_proj = shards.first(), shards.last()
        self.q_norm = self.k_norm = None
        self.rotary = RotaryEmbedding(site.at("rotary"), size, rotary_size)
        self.attn = shards.attention(site.at("attn"))


class StoredMergedMLP(GatedMLP):
    """Gated MLP whose gate and up projections are one tensor in checkpoints."""

    def __init__(self, site: Site, hidden_size: int, inner_size: int, activation: str) -> None:
        PluggableLayer.__init__(self, site)
        names = ProjectionNames("gate_up_proj", "down_proj")
        shards = shard_mlp(site, hidden_size, inner_size, names, {"gate_up_proj": 2})
        self.gate_up_proj = shards.first()
        self.activation = GatedActivation(site.at("activation"), activation, shards.size)
        self.down_proj = shards.last()


class Phi3(DecoderFamily):
    """Settings of Phi-3, Phi-4 and Phi-4-mini, which also build the decoder.

    The angles have two sets of factors, for short and for long sequences. Here all sequences use
    the set for the config's context length: the long one if it is above the original context
    length.
    """

    reads_partial_rotary_factor: ClassVar[bool] = True
    rms_norm_eps: Epsilon = 1e-5
    original_max_position_embeddings: Positive | None = 4096

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """The parameters of the rotary scaling, with ``rope_type``."""
        scaling = super().rope_scaling
        kind = scaling.get("rope_type", scaling.get("type"))
        return {**scaling, "rope_type": "longrope"} if kind in _OLD_NAMES else scaling

    def slides(self, index: int) -> bool:
        """Return True: every layer has a sliding window, if the config states one."""
        return True

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with one stored QKV projection."""
        return StoredMergedAttention(site, spec, self.hidden_size, self.rotary_size)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the gated MLP of a decoder block."""
        sizes = self.hidden_size, self.intermediate_size
        return StoredMergedMLP(block.at("mlp"), *sizes, self.hidden_act)
