"""What layers must hold for the compiled library to compute them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module

from interposer_cpu import (
    native_activations,
    native_heads,
    native_linear,
    native_norms,
    native_quantizers,
)
from interposer_ops.coded_product import CodedProduct
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding

__all__ = ["Watch", "activation_number", "adds", "form_of", "normalises", "turns"]

# Kernels that multiply floats by a weight that holds everything else.
_PRODUCTS = frozenset(
    {
        native_linear.linear,
        native_linear.mxfp4_linear,
        native_linear.w4a16_linear,
        native_linear.w8a16_linear,
    }
)
# The same of int8 codes.
_CODED = frozenset({native_linear.int8_linear, native_linear.w4a8_linear})
_GELU = {"none": 1, "tanh": 2}


class Watch:
    """Whether somebody wants to know when one of some modules is called.

    Attributes:
        hooks: those of the modules and of all there are; none is true where nobody does. In an
            object, as whoever copies containers of a layer would keep hooks of before.
    """

    __slots__ = ("hooks", "modules")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = tuple(modules)
        own = (h for m in self.modules for h in (m._forward_hooks, m._forward_pre_hooks))
        self.hooks: tuple[Any, ...] = (
            every_module._global_forward_hooks,
            every_module._global_forward_pre_hooks,
            *own,
        )

    def __reduce__(self) -> tuple[type[Watch], tuple[tuple[nn.Module, ...]]]:
        """Let a copy look at the copies of the modules, and at what is common to all."""
        return Watch, (self.modules,)


def form_of(kernel: Callable[..., Any] | None) -> int | None:
    """Return 0 of the library's products of floats, 1 of those of codes, None of other kernels."""
    if type(kernel) is CodedProduct:
        coded = kernel.quantize is native_quantizers.quantize_int8_per_token
        return 1 if coded and kernel.product in _CODED else None
    return 0 if kernel in _PRODUCTS else None


def activation_number(activation: GatedActivation) -> int | None:
    """Return the library's number of an activation that it computes, else None."""
    if type(activation) is not GatedActivation:
        return None
    if activation.activate is native_activations.silu_and_mul:
        return 0
    if activation.activate is native_activations.gelu_and_mul:
        return _GELU[activation.options[0]]
    return None


def turns(rotary: RotaryEmbedding) -> bool:
    """Say whether the rotation is the library's."""
    return type(rotary) is RotaryEmbedding and rotary.rotate is native_heads.rotary_embedding


def normalises(norm: RMSNorm | None) -> bool:
    """Say whether there is no norm, or the library's."""
    return norm is None or (type(norm) is RMSNorm and norm.norm is native_norms.rms_norm)


def adds(norm: RMSNorm) -> bool:
    """Say whether the norm is the library's, the one of a stream as well."""
    return normalises(norm) and norm.add_norm is native_norms.fused_add_rms_norm
