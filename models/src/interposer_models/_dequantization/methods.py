"""Layer methods that dequantize stored weights once, to the model's dtype.

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
    """Linear method that dequantizes the weight ``[O, I]`` of another method once."""

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
        """Register the quantized parameters of ``method``."""
        self.method.create_weights(layer, site, in_features, out_features, bias)

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the dequantized float64 weight of ``method``."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the kernel of the op ``linear``, weight and bias.

        Raises: CheckpointError: as ``method`` does.
        """
        weight, bias = (
            _dequantized_weight(self.method, layer, self.dtype),
            layer._parameters.get("bias"),
        )
        stored = self.method.finalize(layer)
        if weight is None:
            return stored
        # The stored method has checked the weights; free its operands before packing the plain one.
        del stored
        _replace_parameters(layer, weight, bias)
        return self.plain.finalize(layer)


class DequantizedEmbedding(EmbeddingMethod):
    """Embedding method that dequantizes the table ``[V, H]`` of another method once."""

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
        """Register the quantized parameters of ``method``."""
        self.method.create_weights(layer, site, vocab_size, hidden_size, head)

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the dequantized float64 table of ``method``."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return the kernels of the ops ``embedding`` and ``linear`` on the table.

        Raises: CheckpointError: as ``method`` does.
        """
        weight = _dequantized_weight(self.method, layer, self.dtype)
        stored = self.method.finalize(layer)
        if weight is None:
            return stored
        del stored
        _replace_parameters(layer, weight)
        return self.plain.finalize(layer)


def _dequantized_weight(
    method: LinearMethod | EmbeddingMethod, layer: nn.Module, dtype: torch.dtype
) -> Tensor | None:
    """Return the weight in the model's dtype; None if the method cannot dequantize."""
    exact = method.dequantized(_on_host(layer))
    if exact is None:
        prefix = getattr(layer, "prefix", "a layer")
        _log.warning("%s: its method states no weight, so it keeps the reference", prefix)
        return None
    device = next(layer.parameters()).device
    if device.type != "cpu":
        return exact.to(dtype).to(device)
    weight = host_memory.empty(exact.shape, dtype)
    return weight.copy_(exact)


def _on_host(layer: nn.Module) -> nn.Module:
    """Return the layer, or a copy with all parameters on the host.

    Some accelerators cannot compute in float64, and their memory might not hold several copies.
    """
    if all(parameter.device.type == "cpu" for parameter in layer.parameters()):
        return layer
    host_layer = object.__new__(type(layer))
    vars(host_layer).update(vars(layer), _parameters={})
    for name, parameter in layer._parameters.items():
        host_parameter = None if parameter is None else nn.Parameter(parameter.data.cpu(), False)
        if host_parameter is not None:
            host_parameter.__dict__.update(vars(parameter))
        host_layer.register_parameter(name, host_parameter)
    return host_layer


def _replace_parameters(layer: nn.Module, weight: Tensor, bias: nn.Parameter | None = None) -> None:
    """Replace all parameters of the layer by ``weight`` and ``bias``."""
    for name in list(layer._parameters):
        layer.register_parameter(name, None)
    layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    layer.register_parameter("bias", bias)
