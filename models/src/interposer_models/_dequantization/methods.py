"""Methods of layers that hold in the model's dtype what is stored quantized.

Dimensions: O output features, I input features, V vocabulary, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Call, EmbeddingMethod, LinearMethod, Site
from interposer_ops.devices import host_memory
from interposer_ops.embedding import embedding
from interposer_ops.layers.embedding import PlainEmbedding
from interposer_ops.layers.linear import PlainLinear
from interposer_ops.linear import linear

_log = logging.getLogger("interposer")


class DequantizedLinear(LinearMethod):
    """Holds the weight ``[O, I]`` that the parameters of ``method`` stand for, rounded once."""

    def __init__(
        self, method: LinearMethod, site: Site, in_features: int, out_features: int
    ) -> None:
        self.method = method
        self.dtype = site.dtype
        self.plain = PlainLinear()
        self.plain.bound = site.bind_kernel(
            linear, in_features=in_features, out_features=out_features
        )

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register what ``method`` does."""
        self.method.create_weights(layer, site, in_features, out_features, bias)

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the float64 weight of ``method``."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the kernel of the op ``linear`` with the weight.

        Raises: CheckpointError: as ``method`` does.
        """
        weight, bias = _rounded(self.method, layer, self.dtype), layer._parameters.get("bias")
        stored = self.method.finalize(layer)
        if weight is None:
            return stored
        del stored
        _hold(layer, weight, bias)
        return self.plain.finalize(layer)


class DequantizedEmbedding(EmbeddingMethod):
    """Holds the table ``[V, H]`` that the parameters of ``method`` stand for, rounded once."""

    def __init__(
        self, method: EmbeddingMethod, site: Site, vocab_size: int, hidden_size: int, head: Site
    ) -> None:
        self.method = method
        self.dtype = site.dtype
        self.plain = PlainEmbedding()
        table = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        sizes = {"in_features": hidden_size, "out_features": vocab_size}
        bound = site.bind_table(embedding, table, linear, sizes, head)
        self.plain.lookup, self.plain.product = bound

    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register what ``method`` does."""
        self.method.create_weights(layer, site, vocab_size, hidden_size, head)

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the float64 table of ``method``."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return the kernels of the ops ``embedding`` and ``linear`` with the table.

        Raises: CheckpointError: as ``method`` does.
        """
        weight = _rounded(self.method, layer, self.dtype)
        stored = self.method.finalize(layer)
        if weight is None:
            return stored
        del stored
        _hold(layer, weight)
        return self.plain.finalize(layer)


def _rounded(
    method: LinearMethod | EmbeddingMethod, layer: nn.Module, dtype: torch.dtype
) -> Tensor | None:
    """Return what the parameters stand for, in the model's dtype; None if the method can't tell."""
    exact = method.dequantized(_on_host(layer))
    if exact is None:
        where = getattr(layer, "prefix", "a layer")
        _log.warning("%s: its method states no weight, so it keeps the reference", where)
        return None
    device = next(layer.parameters()).device
    if device.type != "cpu":
        return exact.to(dtype).to(device)
    weight = host_memory.empty(exact.shape, dtype)
    return weight.copy_(exact)


def _on_host(layer: nn.Module) -> nn.Module:
    """Return the layer with its parameters on the host.

    Not every accelerator computes in float64, and its memory would have to hold several copies.
    """
    if all(parameter.device.type == "cpu" for parameter in layer.parameters()):
        return layer
    copy = object.__new__(type(layer))
    vars(copy).update(vars(layer), _parameters={})
    for name, parameter in layer._parameters.items():
        held = None if parameter is None else nn.Parameter(parameter.data.cpu(), False)
        if held is not None:
            held.__dict__.update(vars(parameter))
        copy.register_parameter(name, held)
    return copy


def _hold(layer: nn.Module, weight: Tensor, bias: nn.Parameter | None = None) -> None:
    """Register ``weight`` and ``bias`` in place of all that the layer has."""
    for name in list(layer._parameters):
        layer.register_parameter(name, None)
    layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    layer.register_parameter("bias", bias)
