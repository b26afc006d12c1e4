"""The mixture of experts that some decoders have in place of one perceptron.

Dimensions: T tokens, H hidden size, K chosen experts.
"""

from __future__ import annotations

import torch
from torch import nn

from interposer import ExpertsSpec, Site
from interposer_models._decoder.config import DecoderConfig, Mixture
from interposer_ops.layers.experts import Experts, Router


class MixtureMLP(nn.Module):
    """A router and the experts that it sends tokens to."""

    def __init__(self, site: Site, config: DecoderConfig, mixture: Mixture) -> None:
        super().__init__()
        num_experts, top_k = config.num_local_experts, config.num_experts_per_tok
        assert num_experts is not None
        assert top_k is not None
        self.router = Router(
            site.at(mixture.router),
            config.hidden_size,
            num_experts,
            top_k,
            config.norm_topk_prob if mixture.renormalize is None else mixture.renormalize,
            mixture.biased,
        )
        self.experts = Experts(
            site.at("experts"),
            ExpertsSpec(
                hidden_size=config.hidden_size,
                intermediate_size=config.expert_size,
                num_experts=num_experts,
                top_k=top_k,
                activation=mixture.activation,
                biased=mixture.biased,
                alternating=mixture.alternating,
                inputs_first=mixture.inputs_first,
                projections=mixture.projections,
            ),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[T, H]``."""
        weights, expert_ids = self.router(x)
        return self.experts(x, weights, expert_ids)  # type: ignore[no-any-return]
