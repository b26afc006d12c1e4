"""Linear layers of 8-bit floats that inputs as they are, or otherwise rounded, are multiplied by.

Dimensions: I input features, O output features, G groups, P layers of the checkpoint that are
fused; R rows and C columns of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer.errors import ConfigError
from interposer_ops.linear import linear
from interposer_ops.quantizers import decode_e8m0
from interposer_quantization._compressed_tensors.exponents import (
    check_exponents,
    register_exponents,
)
from interposer_quantization._compressed_tensors.parameters import (
    number_of_groups,
    register_scales,
    scales_by_output,
)
from interposer_quantization._compressed_tensors.stored import Inputs, Weights
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import FORMAT, register


class Fp8WeightLinear(WeightLinear):
    """``weight`` ``[O, I]`` float8_e4m3fn and ``weight_scale``, in the shape of the strategy.

    No op multiplies by such weights unless inputs are alike. So they are brought to the model's
    dtype once, when the layer is finalized, and take its memory from then on.

    ``exponents`` says that scales are powers of two, of which the exponents are stored.
    """

    def __init__(self, weights: Weights, inputs: Inputs | None, exponents: bool = False) -> None:
        super().__init__(inputs)
        self.weights = weights
        self.exponents = exponents

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> BoundKernel[Any, Any]:
        """Register ``weight`` and ``weight_scale``, and return a kernel for plain weights.

        Raises: ConfigError: groups do not divide the layer, or a block lies across two layers.
        """
        register(layer, weight=torch.empty(out_features, in_features, dtype=FORMAT))
        strategy, size = self.weights.strategy, self.weights.inputs_per_scale
        if self.exponents:
            num_groups = number_of_groups(site, in_features, size or in_features)
            register_exponents(layer, "weight_scale", out_features, num_groups)
        elif strategy == "block":
            self._register_blocks(layer, site, in_features)
        elif strategy == "tensor":
            register_scales(layer, "weight_scale", self.members, None)
        else:
            columns = number_of_groups(site, in_features, size or in_features)
            register_scales(layer, "weight_scale", self.members, columns)
        return site.bind_kernel(linear, in_features=in_features, out_features=out_features)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]`` that is multiplied by, in the model's dtype."""
        return self._plain(layer).double()

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the weight in the model's dtype.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter("weight_scale")
        if self.exponents:
            check_exponents(self.members, scales, "weight_scale")
        else:
            self.members.check(scales, "weight_scale")
        return {"weight": self._plain(layer)}

    def _plain(self, layer: nn.Module) -> torch.Tensor:
        weight, stored = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        numbers = decode_e8m0(stored, torch.float32) if self.exponents else stored
        scales = scales_by_output(numbers, self.members)
        if self.weights.strategy == "block":
            rows, columns = self.weights.size or (1, 1)
            scales = scales.repeat_interleave(rows, 0)[: len(weight)]
            scales = scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
            return (weight.float() * scales).to(self.dtype)
        grouped = weight.float().unflatten(1, (scales.shape[1], -1))
        plain: torch.Tensor = (grouped * scales.unsqueeze(-1)).flatten(1).to(self.dtype)
        return plain

    def _register_blocks(self, layer: nn.Module, site: Site, in_features: int) -> None:
        rows, columns = self.weights.size or (1, 1)
        sizes = self.members.sizes
        if len(sizes) > 1 and any(size % rows for size in sizes.values()):
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(
                f"{site.prefix}: blocks of {rows} rows do not divide the outputs of the layers "
                f"that are fused there: {listed}. Try: blocks that do, or name them in 'ignore'"
            )
        num_rows = -(-sum(sizes.values()) // rows)
        scales = torch.empty(num_rows, -(-in_features // columns), dtype=torch.float32)
        register(layer, weight_scale=scales)
