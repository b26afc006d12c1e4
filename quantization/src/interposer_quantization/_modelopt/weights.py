"""Weight-only integer linear layers of ModelOpt.

Dimensions: I input features, O output features, G groups.

Source: ``to_quantized_weight`` of NVIDIA ModelOpt 0.47 for the tensor layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer.errors import ConfigError
from interposer_quantization._compressed_tensors.parameters import count_groups
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import register
from interposer_quantization._weights.int_packing import to_kernel_layout
from interposer_quantization._weights.weight_only import bind_weight_only

_SIGN = 8


class Int4WeightLinear(WeightLinear):
    """Linear method for ``weight`` ``[O / 2, I]`` uint8, two outputs per byte, low nibble first.

    Values are signed 4-bit integers. ``weight_scale`` is ``[O, G]``.
    """

    def __init__(self, group_size: int) -> None:
        super().__init__(None)
        self.group_size = group_size

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register the packed weight and scales, and bind the 4-bit kernel.

        Raises: ConfigError: groups do not divide the inputs, or a layer's number of outputs is odd.
        """
        num_groups = count_groups(site, in_features, self.group_size)
        for member, size in self.members.sizes.items():
            if size % 2:
                raise ConfigError(
                    f"{site.prefix}: {member} has {size} outputs, which are stored in pairs. "
                    "Try: leave the layer out when the model is quantized"
                )
        packed = torch.empty(out_features // 2, in_features, dtype=torch.uint8)
        scales = torch.empty(out_features, num_groups, dtype=torch.float32)
        register(layer, weight=packed, weight_scale=scales)
        sizes = in_features, out_features, self.group_size
        return bind_weight_only(site, 4, *sizes, biased=bias)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * group scale."""
        scales = layer.get_parameter("weight_scale").double()
        return (_offset_codes(layer).double() - _SIGN) * scales.repeat_interleave(
            self.group_size, 1
        )

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the weight in the op's layout, two inputs per byte, and the scales.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter("weight_scale")
        self.members.check(scales, "weight_scale")
        weight = to_kernel_layout(_offset_codes(layer), 4)
        return {"weight": weight, "scale": scales, "zero_points": None}


class Int8WeightLinear(WeightLinear):
    """Linear method for ``weight`` ``[O, I]`` int8 and ``weight_scale`` ``[O]``."""

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register the quantized weight and scales, and bind the 8-bit kernel."""
        weight = torch.empty(out_features, in_features, dtype=torch.int8)
        register(layer, weight=weight, weight_scale=torch.empty(out_features, dtype=torch.float32))
        # One scale per output: a group has all inputs.
        return bind_weight_only(site, 8, in_features, out_features, in_features, biased=bias)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * output scale."""
        scales = layer.get_parameter("weight_scale").double()
        return layer.get_parameter("weight").double() * scales.unsqueeze(1)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the stored tensors as the op's constants.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter("weight_scale")
        self.members.check(scales, "weight_scale")
        weight = layer.get_parameter("weight")
        return {"weight": weight, "scale": scales.data.unsqueeze(1), "zero_points": None}


def _offset_codes(layer: nn.Module) -> torch.Tensor:
    """Unpack ``weight`` to ``[O, I]`` uint8: the signed values plus 8."""
    packed = layer.get_parameter("weight").data
    # Flipping the sign bit of a 4-bit two's complement value adds 8.
    return torch.stack((packed & 15, packed >> 4), 1).flatten(0, 1) ^ _SIGN
