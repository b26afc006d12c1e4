"""The gated activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from interposer import PluggableLayer, Site
from interposer.errors import UnknownNameError
from interposer_ops.activations._activations import gelu_and_mul, silu_and_mul

__all__ = ["GatedActivation"]

_GELU = {"gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
_SILU = ("silu", "swish")


class GatedActivation(PluggableLayer):
    """Gate one half of the input by the activation of the other.

    Raises: UnknownNameError: ``activation`` is not a name of Hugging Face configs known here.
    """

    layer_id = "activation"

    def __init__(self, site: Site, activation: str, intermediate_size: int) -> None:
        super().__init__(site)
        self.activate: Callable[..., Tensor]
        self.options: tuple[str, ...] = ()
        if activation in _SILU:
            self.activate = site.bind(silu_and_mul, intermediate_size=intermediate_size)
        elif activation in _GELU:
            form = _GELU[activation]
            sizes = {"intermediate_size": intermediate_size}
            self.activate = site.bind(gelu_and_mul, **sizes, approximate=form)
            self.options = (form,)
        else:
            raise UnknownNameError("activation", activation, (*_SILU, *_GELU))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., I]`` of ``x`` ``[..., 2 I]``."""
        return self.activate(x, *self.options)
