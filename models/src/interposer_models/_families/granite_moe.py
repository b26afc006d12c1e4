"""Granite MoE: Granite with experts in place of the MLP.

Source: huggingface.co/ibm-granite/granite-3.1-3b-a800m-instruct.
"""

from __future__ import annotations

from torch import nn

from interposer import Site
from interposer_models._decoder.mixture import MixtureFamily, MixtureMLP, count_of_experts
from interposer_models._decoder.settings import Positive
from interposer_models._families.granite import Granite

_STORED_AS = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}


class GraniteMoe(MixtureFamily, Granite):
    """Granite 3 with experts; checkpoints store the matrices of all experts as one."""

    num_local_experts: Positive | None = count_of_experts(8)
    num_experts_per_tok: Positive | None = 2

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Return the experts, the weights of which add up to 1 for each token."""
        site = block.at("block_sparse_moe")
        mixture = MixtureMLP(site, self.experts(), "router.layer", renormalize=True)
        for name, parameter in mixture.experts.named_parameters():
            if name in _STORED_AS:
                parameter.stored_as = f"{site.prefix}.{_STORED_AS[name]}"  # type: ignore[attr-defined]
        return mixture
