"""Granite MoE: Granite with MoE layers instead of MLPs.

Source: huggingface.co/ibm-granite/granite-3.1-3b-a800m-instruct.
"""

from __future__ import annotations

from torch import nn

from interposer import Site
from interposer_models._decoder.mixture import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Positive
from interposer_models._families.granite import Granite

# Checkpoints store all experts' matrices as one tensor, named like a linear layer.
_STORED_AS = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}


class GraniteMoe(MixtureFamily, Granite):
    """Granite 3 with experts; checkpoints store the matrices of all experts as one tensor."""

    num_local_experts: Positive | None = count_of_experts(8)
    num_experts_per_tok: Positive | None = 2

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer; the weights of a token's experts sum to 1."""
        moe_site = block.at("block_sparse_moe")
        moe = MixtureMLP(moe_site, self.experts(), "router.layer", renormalize=True)
        for name, parameter in moe.experts.named_parameters():
            if name in _STORED_AS:
                parameter.stored_as = f"{moe_site.prefix}.{_STORED_AS[name]}"  # type: ignore[attr-defined]
        return moe
