"""Linear layers of heads: each head has its own inputs and its own weight.

Dimensions: N heads, T tokens, I input features, O output features of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer_ops.linear._linear import batched_linear

__all__ = ["HeadLinear", "HeadWeight"]


class HeadWeight(NamedTuple):
    """A prepared weight of ``HeadLinear``.

    Attributes:
        operand: the weight in the form that the layer multiplies by, in containers of tensors.
        values: ``[N, O, I]``, the numbers that ``operand`` represents, in the dtype of the model.
    """

    operand: Any
    values: Tensor


class HeadLinear(PluggableLayer):
    """N linear layers without bias, with a weight ``[N, O, I]`` in the dtype of the model.

    A replacement may quantize the weight as the quantization scheme at ``site`` quantizes plain
    weights. A layer that contains this one and loads the weight itself calls ``prepared`` and
    ``project``, and keeps the operand.

    Attributes:
        multiply: kernel of the op ``batched_linear``.
    """

    layer_id = "head_linear"

    def __init__(self, site: Site, num_heads: int, in_features: int, out_features: int) -> None:
        super().__init__(site)
        self.num_heads, self.in_features, self.out_features = num_heads, in_features, out_features
        weight = torch.empty(num_heads, out_features, in_features, dtype=site.dtype)
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        sizes = {"in_features": in_features, "out_features": out_features}
        self._bound = site.bind_kernel(batched_linear, num_heads=num_heads, **sizes)
        self.multiply = self._bound.function
        self.operand: Any = None

    def quantizes(self) -> bool:
        """Say whether ``prepared`` quantizes the weight."""
        return False

    def prepared(self, weight: Tensor) -> HeadWeight:
        """Prepare a plain weight ``[N, O, I]``."""
        # [N, I, O] is the layout of batched_linear.
        plain = weight.transpose(1, 2).contiguous()
        return HeadWeight(self._bound.prepared(weight=plain)["weight"], weight)

    def project(self, x: Tensor, operand: Any) -> Tensor:
        """Multiply ``x`` ``[N, T, I]`` by a prepared weight head by head; return ``[N, T, O]``."""
        return self.multiply(x, operand)

    def finalize(self) -> None:
        """Prepare the weight for the kernel."""
        self.operand = self.prepared(self.get_parameter("weight").data).operand

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[N, T, I]`` head by head; return ``[N, T, O]``."""
        return self.project(x, self.operand)
