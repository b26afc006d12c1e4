"""The MLP without a gate: a projection, an activation, and a projection back.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from interposer import Site
from interposer.errors import UnknownNameError
from interposer_ops.activations import gelu
from interposer_ops.layers.linear import Linear

Names = tuple[str, str]
"""Of the two projections, as checkpoints have them."""

_FORMS = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu": "none"}
_RELU = "relu"


class PlainMLP(nn.Module):
    """A projection, GELU or ReLU, and a projection back.

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
        if activation not in (*_FORMS, _RELU):
            raise UnknownNameError("activation", activation, (*_FORMS, _RELU))
        hidden, inner = sizes
        self.first = linear(site.at(names[0]), hidden, inner, bias)
        self.gelu: Callable[[Tensor, str], Tensor] | None = None
        if activation != _RELU:
            self.form = _FORMS[activation]
            at = site.at("act")
            self.gelu = at.bind(gelu, intermediate_size=inner, approximate=self.form)
        self.second = linear(site.at(names[1]), inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``."""
        inner = self.first(x)
        inner = inner.relu() if self.gelu is None else self.gelu(inner, self.form)
        return self.second(inner)  # type: ignore[no-any-return]
