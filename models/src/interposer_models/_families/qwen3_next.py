"""Qwen3-Next: Gated DeltaNet and experts as in Qwen3.5, with projections interleaved by key head.

Source: huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from interposer import ExpertsSpec, Site
from interposer_models._decoder.delta_rule import GroupedProjections, Projections
from interposer_models._decoder.mixture import SparseFamily, count_of_experts
from interposer_models._decoder.settings import Positive, Share
from interposer_models._families.qwen2_moe import GatedSharedExpertMoE
from interposer_models._families.qwen3_5 import LayerKinds, Qwen3_5


class Qwen3Next(SparseFamily, Qwen3_5):
    """Settings of Qwen3-Next, which also build the decoder."""

    projections: ClassVar[Projections] = GroupedProjections

    head_dim: Positive | None = 256
    partial_rotary_factor: Share = 0.25
    layer_types: LayerKinds | None = None
    num_local_experts: Positive | None = count_of_experts(512)
    num_experts_per_tok: Positive | None = 10
    moe_intermediate_size: Positive = 512
    shared_expert_intermediate_size: Positive = 512
    norm_topk_prob: bool = True

    def mixture(self, site: Site, experts: ExpertsSpec) -> nn.Module:
        """Build the MoE layer with a shared expert."""
        shared = self.shared_expert_intermediate_size
        return GatedSharedExpertMoE(site, experts, shared, self.norm_topk_prob)
