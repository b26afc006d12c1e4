"""Linear layer in float32 or wider, such as a router. T tokens, H hidden size, O outputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from interposer import PluggableLayer, Site
from interposer_ops.linear._linear import linear

__all__ = ["WideLinear"]


class WideLinear(PluggableLayer):
    """Linear layer in float32 or wider, whatever the model's dtype and quantization scheme.

    Used where rounding would change a decision, such as which expert or token is chosen. ``weight``
    ``[O, H]`` and ``bias`` ``[O]`` are small.
    """

    def __init__(self, site: Site, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(site)
        self.dtype = torch.promote_types(site.dtype, torch.float32)
        sizes = {"in_features": in_features, "out_features": out_features}
        self.bound = replace(site, dtype=self.dtype).bind_kernel(linear, **sizes, biased=bias)
        weight = torch.empty(out_features, in_features, dtype=self.dtype)
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        offsets = torch.empty(out_features, dtype=self.dtype) if bias else None
        parameter = None if offsets is None else nn.Parameter(offsets, requires_grad=False)
        self.register_parameter("bias", parameter)
        self.operands: tuple[Tensor | None, ...] = ()

    def finalize(self) -> None:
        """Prepare the weights if the kernel requires preparation."""
        weight, bias = self.get_parameter("weight"), self._parameters["bias"]
        prepared = self.bound.prepared(weight=weight, bias=bias)
        # The kernel keeps the prepared copy; keeping the original too would double the memory.
        if prepared["weight"] is not weight:
            self.register_parameter("weight", None)
        self.operands = prepared["weight"], prepared["bias"]

    def forward(self, x: Tensor) -> Tensor:
        """Project ``x`` ``[T, H]`` to ``[T, O]``, float32 or wider."""
        return self.bound.function(x.to(self.dtype), *self.operands)  # type: ignore[arg-type]
