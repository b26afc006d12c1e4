"""Gated activation of an MLP. T tokens, I intermediate size."""

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
    """Split the input in two halves, and multiply the activation of the first half by the second.

    Raises: UnknownNameError: ``activation`` is not a known name of Hugging Face configs.
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
        """Quantize results for ``receiver`` from now on, if a fused kernel computes both steps.

        Nothing changes if ``receiver`` takes no quantized input or no such kernel exists.

        Args:
            receiver: the only layer that reads the result.
        """
        sizes = {"intermediate_size": receiver.in_features}
        kernels = (
            ()
            if self.options  # no fused op quantizes after a gelu
            else bind_quantizing(site, receiver, (silu_and_mul_quantize_fp8, sizes))
        )
        if kernels:
            self._quantize: Callable[..., Tensor] = kernels[0].function
            self._receiver = (receiver,)  # a tuple hides the module from torch's child modules
            self._quantized_dtype = receiver.method.input_codes

    def forward(self, x: Tensor) -> Tensor:
        """Compute the gated activation ``[T, I]`` of ``x`` ``[T, 2 I]``.

        The result is quantized once ``quantize_for`` has found a receiver.
        """
        if self._receiver:
            scale: Tensor = self._receiver[0].operands[0]
            return self._quantize(x, scale, self._quantized_dtype)
        return self.activate(x, *self.options)
