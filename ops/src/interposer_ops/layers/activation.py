"""The gated activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from interposer import PluggableLayer, Site
from interposer.errors import UnknownNameError
from interposer_ops.activations._activations import (
    gelu_and_mul,
    silu_and_mul,
    silu_and_mul_quantize_fp8,
)
from interposer_ops.layers.fusion import bind_quantizing
from interposer_ops.layers.linear import Linear

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
        self._receiver: tuple[Linear, ...] = ()
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

    def quantize_for(self, site: Site, receiver: Linear) -> None:
        """Return codes for ``receiver``, if it takes some and a kernel is there.

        Args:
            receiver: all that reads the result.
        """
        sizes = {"intermediate_size": receiver.in_features}
        bound = (
            ()
            if self.options
            else bind_quantizing(site, receiver, (silu_and_mul_quantize_fp8, sizes))
        )
        if bound:
            self._quantize: Callable[..., Tensor] = bound[0].function
            self._receiver = (receiver,)  # in a tuple, so that it is no module of its own
            self._codes = receiver.method.input_codes

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., I]`` of ``x`` ``[..., 2 I]``, or its codes, see ``quantize_for``."""
        if self._receiver:
            scale: Tensor = self._receiver[0].operands[0]
            return self._quantize(x, scale, self._codes)
        return self.activate(x, *self.options)
