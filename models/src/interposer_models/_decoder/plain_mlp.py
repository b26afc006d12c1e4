"""The MLP without a gate: up projection, activation, down projection.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from interposer import Site
from interposer.errors import UnknownNameError
from interposer_ops.activations import gelu, quick_gelu, relu2
from interposer_ops.layers.divided_pairs import PairNames, share_inner
from interposer_ops.layers.linear import Linear

Names = tuple[str, str]
"""The names of the up and the down projection in checkpoints."""

# GELU spellings of transformers, by the op's ``approximate`` argument.
_FORMS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu": "none"}
_OPS = {"quick_gelu": quick_gelu, "relu2": relu2}
_RELU = "relu"


class PlainMLP(nn.Module):
    """Two linear layers with GELU, ReLU or squared ReLU in between.

    Args:
        sizes: H and the intermediate size.
        names: of the projections below the site.
        linear: the layer class of both projections.
    """

    def __init__(
        self,
        site: Site,
        sizes: tuple[int, int],
        names: Names,
        activation: str,
        bias: bool,
        linear: type[Linear] = Linear,
    ) -> None:
        super().__init__()
        if activation not in (known_activations := (*_FORMS, *_OPS, _RELU)):
            raise UnknownNameError("activation", activation, known_activations)
        hidden, intermediate = sizes
        outputs = {names[0].rpartition(".")[2]: 1}
        shards = share_inner(
            site, hidden, intermediate, PairNames(*names, bias, bias), outputs, linear
        )
        intermediate = shards.size
        self.first = shards.first()
        self.activate: Callable[..., Tensor] = torch.relu
        self.options: tuple[str, ...] = ()
        activation_site = site.at("act")
        if activation in _OPS:
            self.activate = activation_site.bind(_OPS[activation], intermediate_size=intermediate)
        elif activation in _FORMS:
            self.options = (_FORMS[activation],)
            self.activate = activation_site.bind(
                gelu, intermediate_size=intermediate, approximate=_FORMS[activation]
            )
        self.second = shards.last()

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[T, H]`` from ``x`` ``[T, H]``."""
        return self.second(self.activate(self.first(x), *self.options))  # type: ignore[no-any-return]
