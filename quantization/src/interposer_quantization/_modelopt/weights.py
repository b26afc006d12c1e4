"""Linear layers of integers of which ModelOpt quantizes the weights and not the inputs.

Dimensions: I input features, O output features, G groups.

Source: ``to_quantized_weight`` of NVIDIA ModelOpt 0.47 for what is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer.errors import ConfigError
from interposer_quantization._compressed_tensors.parameters import number_of_groups
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import register
from interposer_quantization._weights.int_packing import kernel_codes
from interposer_quantization._weights.weight_only import bind_weight_only

_SIGN = 8


class Int4WeightLinear(WeightLinear):
    """``weight`` ``[O / 2, I]`` uint8, two outputs a byte, and ``weight_scale`` ``[O, G]``.

    A weight is a signed integer of 4 bits times its scale; the first output has the low bits.
    """

    def __init__(self, group_size: int) -> None:
        super().__init__(None)
        self.group_size = group_size

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register the codes and scales, and return a kernel for integers of 4 bits.

        Raises: ConfigError: groups do not divide the inputs, or pairs the outputs.
        """
        num_groups = number_of_groups(site, in_features, self.group_size)
        for member, size in self.members.sizes.items():
            if size % 2:
                raise ConfigError(
                    f"{site.prefix}: {member} has {size} outputs, which are stored in pairs. "
                    "Try: leave the layer out when the model is quantized"
                )
        codes = torch.empty(out_features // 2, in_features, dtype=torch.uint8)
        scales = torch.empty(out_features, num_groups, dtype=torch.float32)
        register(layer, weight=codes, weight_scale=scales)
        sizes = in_features, out_features, self.group_size
        return bind_weight_only(site, 4, *sizes, biased=bias)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each integer times the scale of its group."""
        scales = layer.get_parameter("weight_scale").double()
        return (_offset_codes(layer).double() - _SIGN) * scales.repeat_interleave(
            self.group_size, 1
        )

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the codes as the op takes them, two inputs a byte, and the scales.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter("weight_scale")
        self.members.check(scales, "weight_scale")
        codes = kernel_codes(_offset_codes(layer), 4)
        return {"weight": codes, "scale": scales, "zero_points": None}


class Int8WeightLinear(WeightLinear):
    """``weight`` ``[O, I]`` int8 and ``weight_scale`` ``[O]``."""

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register the codes and scales, and return a kernel for integers of 8 bits."""
        codes = torch.empty(out_features, in_features, dtype=torch.int8)
        register(layer, weight=codes, weight_scale=torch.empty(out_features, dtype=torch.float32))
        return bind_weight_only(site, 8, in_features, out_features, in_features, biased=bias)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each integer times the scale of its output."""
        scales = layer.get_parameter("weight_scale").double()
        return layer.get_parameter("weight").double() * scales.unsqueeze(1)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return what is stored.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter("weight_scale")
        self.members.check(scales, "weight_scale")
        weight = layer.get_parameter("weight")
        return {"weight": weight, "scale": scales.data.unsqueeze(1), "zero_points": None}


def _offset_codes(layer: nn.Module) -> torch.Tensor:
    """Return ``[O, I]`` uint8: the integers in ``weight``, each plus 8."""
    packed = layer.get_parameter("weight").data
    return torch.stack((packed & 15, packed >> 4), 1).flatten(0, 1) ^ _SIGN
