"""Linear layers in the OCP microscaling formats: 32 inputs share a power-of-two scale.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, LinearMethod, Site
from interposer_ops.quantized_linear import CodedProduct, mxfp4_linear, mxfp8_linear
from interposer_ops.quantizers import (
    decode_e2m1,
    decode_e8m0,
    quantize_fp8_blocks,
    quantize_mxfp8,
    unpack_nibbles,
)
from interposer_quantization._compressed_tensors.exponents import (
    check_exponents,
    register_exponents,
)
from interposer_quantization._compressed_tensors.parameters import count_groups, prepare_operands
from interposer_quantization._compressed_tensors.stored import MX_GROUP
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import FORMAT, FORMAT_NAME, Members, register

_MANTISSA_BITS = 23


class Mxfp4Linear(WeightLinear):
    """Linear method for ``weight_packed`` ``[O, I / 2]`` uint8 of e2m1 pairs, low nibble first.

    ``weight_scale`` is ``[O, I / 32]`` uint8. The matmul runs in the model's dtype.
    """

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register the packed weight and scales, and bind the kernel.

        Raises: ConfigError: groups do not divide the inputs.
        """
        num_groups = count_groups(site, in_features, MX_GROUP)
        packed = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
        register(layer, weight_packed=packed)
        register_exponents(layer, "weight_scale", out_features, num_groups)
        sizes = {"in_features": in_features, "out_features": out_features}
        return site.bind_kernel(mxfp4_linear, **sizes, biased=bias)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * 2^(group exponent)."""
        quantized = unpack_nibbles(layer.get_parameter("weight_packed"))
        return _apply_exponents(
            decode_e2m1(quantized, torch.float64), layer.get_parameter("weight_scale")
        )

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the stored tensors as the op's constants.

        Raises: CheckpointError: a scale is the NaN code.
        """
        scales = layer.get_parameter("weight_scale")
        check_exponents(self.members, scales, "weight_scale")
        return {"weight": layer.get_parameter("weight_packed"), "weight_scales": scales}


class Mxfp8Linear(LinearMethod):
    """Linear method for ``weight`` ``[O, I]`` float8_e4m3fn with ``weight_scale`` ``[O, I / 32]``.

    ``weight_scale`` holds uint8 exponents. Inputs are quantized to MXFP8 as well, with the
    exponents that the microscaling specification defines.

    Args:
        rounds_up: input scales are rounded up to powers of two instead, so that no value
            saturates.
    """

    def __init__(self, rounds_up: bool = False) -> None:
        self.rounds_up = rounds_up

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight``, the scales and, if requested, ``bias``.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        num_groups = count_groups(site, in_features, MX_GROUP)
        register(
            layer,
            weight=torch.empty(out_features, in_features, dtype=FORMAT),
            bias=torch.empty(out_features, dtype=site.dtype) if bias else None,
        )
        register_exponents(layer, "weight_scale", out_features, num_groups)
        self.quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
        self.options: tuple[Any, ...] = ()
        if self.rounds_up:
            self.options = MX_GROUP, FORMAT, True
            self.quantize = site.bind(
                quantize_fp8_blocks,
                hidden_size=in_features,
                block_size=MX_GROUP,
                out_dtype=FORMAT_NAME,
                power_of_two_scales=True,
            )
        else:
            self.quantize = site.bind(quantize_mxfp8, hidden_size=in_features)
        sizes = {"in_features": in_features, "out_features": out_features}
        self.bound = site.bind_kernel(mxfp8_linear, **sizes, biased=bias)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * 2^(group exponent)."""
        return _apply_exponents(
            layer.get_parameter("weight").double(), layer.get_parameter("weight_scale")
        )

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: quantized value * 2^(group exponent)."""
        quantized, scales = self.quantize(x, *self.options)
        return _apply_exponents(quantized.double(), self._exponents(scales))

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Combine the input quantizer and the bound kernel; return function and constants.

        Raises: CheckpointError: a scale is the NaN code.
        """
        scales = layer.get_parameter("weight_scale")
        check_exponents(self.members, scales, "weight_scale")
        constants = {
            "weight": layer.get_parameter("weight"),
            "weight_scales": scales,
            "bias": layer._parameters["bias"],
        }
        kernel = CodedProduct(self.quantize, self.bound.function, self._multiply, self.options)
        return kernel, prepare_operands(layer, self.bound, constants)

    def _multiply(
        self,
        quantized: torch.Tensor,
        scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        exponents = self._exponents(scales)
        return self.bound.function(quantized, exponents, weight, weight_scales, bias, self.dtype)

    def _exponents(self, scales: torch.Tensor) -> torch.Tensor:
        """Convert the quantizer's scales to biased exponents, uint8."""
        # float32 and E8M0 use the same exponent bias, and a power of two has a zero mantissa.
        if self.rounds_up:
            return (scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
        return scales


def _apply_exponents(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Multiply values ``[..., I]`` by the group's power of two, in float64."""
    scales = decode_e8m0(exponents, torch.float64)
    blocks = values.unflatten(-1, (scales.shape[-1], MX_GROUP))
    scaled: torch.Tensor = (blocks * scales.unsqueeze(-1)).flatten(-2)
    return scaled
