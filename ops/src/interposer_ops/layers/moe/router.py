"""The router of a MoE layer, which chooses the experts of each token.

Dimensions: T tokens, H hidden size, E experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from interposer import Site
from interposer_ops.experts._routing import topk_softmax
from interposer_ops.layers.wide_linear import WideLinear

__all__ = ["Router", "Routing"]


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts by its logits: the parameters of the op ``grouped_topk``.

    Attributes:
        kernel: kernel of ``grouped_topk``, or of ``topk_softmax``, which has one group.
    """

    kernel: Callable[..., Any]
    top_k: int
    renormalize: bool
    num_groups: int = 1
    top_groups: int = 1
    scoring: str = "softmax"
    scale: float = 1.0


class Router(WideLinear):
    """Choose the top-k experts of each token by a linear layer, with softmax weights.

    Args:
        renormalize: compute the softmax over the chosen experts; False: over all experts.
    Attributes:
        prepared_bias: added to the scores in the choice of experts, as the kernel takes it; None
            without a bias.
    """

    layer_id = "router"
    prepared_bias: Tensor | None = None

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

    def routing(self) -> Routing | None:
        """Return how experts are chosen; None for a subclass, which may choose otherwise."""
        if type(self) is not Router:
            return None
        return Routing(self.select, self.top_k, self.renormalize)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Choose the experts of each token ``x`` ``[T, H]``; return weights and expert ids.

        Returns: weights ``[T, K]`` float32 and expert ids ``[T, K]`` int32.
        """
        return self.choose(super().forward(x))
