"""Mixtral: Mistral with experts, two of which compute each token.

Source: arXiv:2401.04088.
"""

from __future__ import annotations

from torch import nn

from interposer import Site
from interposer_models._decoder.mixture import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Epsilon, Positive, RopeBase


class Mixtral(MixtureFamily):
    """Mixtral; checkpoints store every expert separately."""

    num_local_experts: Positive | None = count_of_experts(8)
    num_experts_per_tok: Positive | None = 2
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: RopeBase = 1e6

    def slides(self, index: int) -> bool:
        """Return True: every layer has the window."""
        return True

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer; the weights of a token's experts sum to 1."""
        experts = self.experts(projections=("w1", "w3", "w2"))
        return MixtureMLP(block.at("block_sparse_moe"), experts, "gate", renormalize=True)
