"""Dense linear layers: single, or several layers that share an input merged into one matmul."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interposer import LinearMethod, PluggableLayer, Site
from interposer_ops.linear._linear import linear

__all__ = ["Linear", "MergedLinear", "PlainLinear"]


class PlainLinear(LinearMethod):
    """Unquantized weights: ``weight`` ``[O, I]`` and ``bias`` ``[O]`` in the model's dtype."""

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight`` and, if requested, ``bias``."""
        sizes = {"in_features": in_features, "out_features": out_features}
        self.bound = site.bind_kernel(linear, **sizes, biased=bias)
        weight = torch.empty(out_features, in_features, dtype=site.dtype)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        offsets = torch.empty(out_features, dtype=site.dtype) if bias else None
        parameter = None if offsets is None else nn.Parameter(offsets, requires_grad=False)
        layer.register_parameter("bias", parameter)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its weights, prepared if the kernel requires preparation."""
        weight, bias = layer.get_parameter("weight"), layer._parameters["bias"]
        prepared = self.bound.prepared(weight=weight, bias=bias)
        if prepared["weight"] is not weight:
            # The kernel keeps the prepared copy; keeping the original too would double the memory.
            layer.register_parameter("weight", None)
        return self.bound.function, (prepared["weight"], prepared["bias"])


class Linear(PluggableLayer):
    """Linear layer; the checkpoint's quantization scheme decides how the weights are stored.

    Attributes:
        exchanges: number of exchanges of any linear layer's weights so far. While it does not
            change, addresses of weights that were looked up before are current.
    """

    layer_id = "linear"
    exchanges: ClassVar[int] = 0

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new kernel or new operands count as an exchange of weights."""
        if name in ("kernel", "operands"):
            Linear.count_exchange()
        super().__setattr__(name, value)

    @staticmethod
    def count_exchange() -> None:
        """Count an exchange of weights that no assignment shows, such as of a tensor's memory."""
        Linear.exchanges += 1

    def __init__(self, site: Site, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(site)
        self._create(site, in_features, {site.prefix.rpartition(".")[2]: out_features}, bias)

    def _create(self, site: Site, in_features: int, parts: Mapping[str, int], bias: bool) -> None:
        self.in_features = in_features
        self.parts = dict(parts)
        # The scheme returns None for layers that the checkpoint leaves unquantized.
        scheme = site.resolver.scheme
        method = scheme.linear_method(site.prefix, tuple(parts)) if scheme else None
        self.method = method or PlainLinear()
        self.method.create_weights(self, site, in_features, sum(parts.values()), bias)
        self.kernel: Callable[..., Tensor] | None = None
        self.operands: tuple[Any, ...] = ()

    @staticmethod
    def mark(layer: Linear) -> None:
        """Mark the parameters that checkpoints store in another form; a subclass overrides this.

        Shards of the layer call this method of the original class.
        """

    def finalize(self) -> None:
        """Let the linear method turn the loaded weights into a kernel and operands."""
        self.kernel, self.operands = self.method.finalize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Project ``x`` ``[..., I]`` to ``[..., O]``."""
        return self.kernel(x, *self.operands)  # type: ignore[misc]

    def extra_repr(self) -> str:
        """Format the sizes for ``repr``."""
        return f"{self.in_features}, {self.parts}"


class MergedLinear(Linear):
    """Several linear layers that share one input, as one matmul: Q, K and V, or gate and up.

    ``parts`` maps checkpoint names to output sizes, in the order of the merged output.
    """

    layer_id = "merged_linear"

    def __init__(
        self, site: Site, in_features: int, parts: Mapping[str, int], bias: bool = False
    ) -> None:
        PluggableLayer.__init__(self, site)
        self._create(site, in_features, parts, bias)
