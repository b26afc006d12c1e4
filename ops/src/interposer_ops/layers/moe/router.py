"""The router of a MoE layer, which chooses the experts of each token.

Dimensions: T tokens, H hidden size, E experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from interposer import Site
from interposer_ops.experts._routing import topk_softmax
from interposer_ops.layers.wide_linear import WideLinear

__all__ = ["Router"]


class Router(WideLinear):
    """Choose the top-k experts of each token by a linear layer, with softmax weights.

    Args:
        renormalize: compute the softmax over the chosen experts; False: over all experts.
    """

    layer_id = "router"

    def __init__(
        self,
        site: Site,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        bias: bool = False,
    ) -> None:
        super().__init__(site, hidden_size, num_experts, bias)
        self.top_k, self.renormalize = top_k, renormalize
        sizes = {"num_experts": num_experts, "top_k": top_k}
        # The op takes logits in the wide dtype of this layer, not in the dtype of the model.
        self.bind_choice(replace(site, dtype=self.dtype), sizes)

    def bind_choice(self, site: Site, sizes: Mapping[str, int]) -> None:
        """Bind the top-k op that chooses the experts; a subclass may bind another op."""
        self.select = site.bind(topk_softmax, **sizes, renormalize=self.renormalize)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and expert ids ``[T, K]`` for logits ``[T, E]``."""
        return self.select(logits, self.top_k, self.renormalize)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Choose the experts of each token ``x`` ``[T, H]``; return weights and expert ids.

        Returns: weights ``[T, K]`` float32 and expert ids ``[T, K]`` int32.
        """
        return self.choose(super().forward(x))
