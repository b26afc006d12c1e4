"""Qwen3.5 with many small experts and a gated shared expert; only the text model.

Source: huggingface.co/Qwen/Qwen3.5-397B-A17B.
"""

from __future__ import annotations

from torch import nn

from interposer import Site
from interposer_models._decoder.mixture import MixtureFamily, count_of_experts
from interposer_models._decoder.settings import Positive, Share
from interposer_models._families.qwen2_moe import GatedSharedExpertMoE
from interposer_models._families.qwen3_5 import LayerKinds, Qwen3_5


class Qwen3_5Moe(MixtureFamily, Qwen3_5):
    """Qwen3.5 with experts; checkpoints store every expert separately."""

    head_dim: Positive | None = 256
    partial_rotary_factor: Share = 0.25
    layer_types: LayerKinds | None = None
    intermediate_size: Positive = 1  # no layer has a dense MLP
    num_local_experts: Positive | None = count_of_experts(256)
    num_experts_per_tok: Positive | None = 8
    moe_intermediate_size: Positive = 512
    shared_expert_intermediate_size: Positive = 512

    @property
    def expert_size(self) -> int:
        """Intermediate size of an expert."""
        return self.moe_intermediate_size

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer of layer ``index``."""
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        shared = self.shared_expert_intermediate_size
        return GatedSharedExpertMoE(block.at("mlp"), experts, shared, renormalize=True)
