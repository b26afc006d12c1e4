"""Qwen3-Next: delta rules and experts as in Qwen3.5, with projections sorted by key head.

Source: huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from interposer import Site
from interposer_models._decoder.delta_rule import GroupedProjections, Projections
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.mixture import count_of_experts
from interposer_models._decoder.settings import Positive
from interposer_models._families.qwen3_5_moe import Qwen3_5Moe


class Qwen3Next(Qwen3_5Moe):
    """Qwen3-Next; some layers may have one MLP."""

    projections: ClassVar[Projections] = GroupedProjections

    intermediate_size: Positive = 5632
    num_local_experts: Positive | None = count_of_experts(512)
    num_experts_per_tok: Positive | None = 10
    norm_topk_prob: bool = True
    decoder_sparse_step: Positive = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def renormalizes(self) -> bool:
        """Say whether the weights of a token's experts add up to 1."""
        return self.norm_topk_prob

    def has_experts(self, index: int) -> bool:
        """Say whether layer ``index`` has experts, not one MLP."""
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the experts of layer ``index``, or its MLP."""
        if self.has_experts(index):
            return super().mlp(block, index)
        return DecoderFamily.mlp(self, block, index)
