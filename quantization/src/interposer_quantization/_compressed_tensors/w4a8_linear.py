"""Linear layers of integer weights of up to four bits with int8 inputs.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import ConfigError
from interposer_ops.quantized_linear import w4a8_linear
from interposer_quantization._compressed_tensors.int8_inputs import Int8Inputs
from interposer_quantization._compressed_tensors.int_linear import IntLinear
from interposer_quantization._compressed_tensors.parameters import prepare_operands
from interposer_quantization._compressed_tensors.stored import Inputs
from interposer_quantization._fp8.parameters import register


class W4A8Linear(LinearMethod):
    """Linear method that multiplies int8 inputs by 4-bit weights.

    Args:
        stored: linear method that reads the checkpoint's weight.
        inputs: int8 quantization of the inputs.
    """

    def __init__(self, stored: IntLinear, inputs: Inputs) -> None:
        self.stored = stored
        self.inputs = Int8Inputs(inputs)
        self.parts_agree = self.inputs.static

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the weight, the input parameters and, if requested, ``bias``.

        Raises: ConfigError: the number of inputs is odd, or groups or packing do not fit the layer.
        """
        if in_features % 2:
            raise ConfigError(
                f"{site.prefix} has {in_features} inputs, but 4-bit weights with int8 inputs need "
                "an even number. Try: leave the layer plain"
            )
        self.dtype = site.dtype
        self.stored.register_weight(layer, site, in_features, out_features)
        register(layer, bias=torch.empty(out_features, dtype=site.dtype) if bias else None)
        self.inputs.create(layer, site, self.stored.members, in_features)
        num_groups = self.stored.num_groups
        self.bound = site.bind_kernel(
            w4a8_linear,
            in_features=in_features,
            out_features=out_features,
            group_size=in_features // num_groups,
            num_groups=num_groups,
            x_scales=self.inputs.x_scales,
            asymmetric_inputs=self.inputs.asymmetric,
            asymmetric_weights=not self.stored.weights.symmetric,
            biased=bias,
        )
        self.fused_kernel = self.inputs.fused_quantizer(self.bound.function, self._multiply)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: (quantized value - zero point) * scale."""
        return self.stored.dequantized(layer)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: (quantized value - zero point) * scale."""
        return self.inputs.dequantized(layer, x)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Combine the input quantizer and the bound kernel; return function and constants.

        Raises: CheckpointError: a tensor holds values that no weight can be computed from, or the
            stored input parameters of fused layers differ.
        """
        static, order = self.inputs.stored(layer), self.stored.order(layer)
        parts = self.stored.constants(layer)
        constants = {
            "weight": parts["weight"],
            "weight_scales": parts["scale"],
            "weight_zero_points": parts["zero_points"],
            "bias": layer._parameters["bias"],
        }
        del parts
        operands = prepare_operands(layer, self.bound, constants)
        # A fused quantizer and matmul cannot permute the quantized inputs in between.
        if order is None and self.fused_kernel is not None:
            return self.fused_kernel, (*operands, *static)
        return self._project, (*operands, order, *static)

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        weight_zero_points: torch.Tensor | None,
        bias: torch.Tensor | None,
        order: torch.Tensor | None,
        *static: torch.Tensor | None,
    ) -> torch.Tensor:
        quantized, scale, zero_point = self.inputs.quantized(x, *static)
        # The scale of a token does not depend on the order of the inputs: permute the smaller int8
        # values.
        if order is not None:
            quantized = quantized.index_select(-1, order)
        return self.bound.function(
            quantized,
            weight,
            scale,
            weight_scales,
            zero_point,
            weight_zero_points,
            bias,
            self.dtype,
        )

    def _multiply(
        self,
        quantized: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        weight_zero_points: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.bound.function(
            quantized, weight, scale, weight_scales, None, weight_zero_points, bias, self.dtype
        )
