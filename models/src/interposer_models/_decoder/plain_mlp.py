"""The MLP without a gate: a projection, an activation, and a projection back.

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
"""Of the two projections, as checkpoints have them."""

_FORMS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu": "none"}
_OPS = {"quick_gelu": quick_gelu, "relu2": relu2}
_RELU = "relu"


class PlainMLP(nn.Module):
    """A projection, GELU, ReLU or the square of the latter, and a projection back.

    Args:
        sizes: H, and the size between the projections.
        names: of the projections below the site.
        linear: the class of both.
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
        if activation not in (known := (*_FORMS, *_OPS, _RELU)):
            raise UnknownNameError("activation", activation, known)
        hidden, inner = sizes
        outputs = {names[0].rpartition(".")[2]: 1}
        shares = share_inner(site, hidden, inner, PairNames(*names, bias, bias), outputs, linear)
        inner = shares.size
        self.first = shares.first()
        self.activate: Callable[..., Tensor] = torch.relu
        self.options: tuple[str, ...] = ()
        at = site.at("act")
        if activation in _OPS:
            self.activate = at.bind(_OPS[activation], intermediate_size=inner)
        elif activation in _FORMS:
            self.options = (_FORMS[activation],)
            self.activate = at.bind(gelu, intermediate_size=inner, approximate=_FORMS[activation])
        self.second = shares.last()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``."""
        return self.second(self.activate(self.first(x), *self.options))  # type: ignore[no-any-return]
