"""Qwen3-MoE: Qwen3 with many small experts, in all layers or some.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

from torch import nn

from interposer import Site
from interposer_models._decoder.mixture import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Positive
from interposer_models._families.qwen3 import Qwen3


class Qwen3Moe(MixtureFamily, Qwen3):
    """Qwen3 with experts; checkpoints store every expert by itself."""

    head_dim: Positive | None = None
    num_local_experts: Positive | None = count_of_experts(128)
    num_experts_per_tok: Positive | None = 8
    moe_intermediate_size: Positive = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def expert_size(self) -> int:
        """Intermediate size of an expert; layers without experts have ``intermediate_size``."""
        return self.moe_intermediate_size

    def slides(self, index: int) -> bool:
        """Say whether there are windows; unlike in Qwen3 from the first layer on."""
        return self.use_sliding_window

    def has_experts(self, index: int) -> bool:
        """Say whether layer ``index`` has experts, not one MLP."""
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the experts of layer ``index``, or its MLP."""
        if not self.has_experts(index):
            return super().mlp(block, index)
        experts = self.experts(projections=("gate_proj", "up_proj", "down_proj"))
        return MixtureMLP(block.at("mlp"), experts, "gate", self.norm_topk_prob)
