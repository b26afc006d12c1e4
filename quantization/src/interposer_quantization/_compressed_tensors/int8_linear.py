"""Linear layers of int8 weights with int8 inputs.

Dimensions: I input features, O output features, P fused layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer_ops.quantized_linear import int8_linear
from interposer_quantization._compressed_tensors.int8_inputs import Int8Inputs
from interposer_quantization._compressed_tensors.parameters import prepare_operands, register_scales
from interposer_quantization._compressed_tensors.stored import Inputs, Weights
from interposer_quantization._fp8.parameters import Members, register


class Int8Linear(LinearMethod):
    """Linear method for ``weight`` ``[O, I]`` int8 with ``weight_scale`` ``[O, 1]`` or ``[P]``."""

    weight_name, scale_name = "weight", "weight_scale"

    def __init__(self, weights: Weights, inputs: Inputs) -> None:
        self.weights = weights
        self.inputs = Int8Inputs(inputs)
        self.parts_agree = self.inputs.static

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight``, the scales, the input parameters and, if requested, ``bias``."""
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        quantized = torch.empty(out_features, in_features, dtype=torch.int8)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        register(layer, **{self.weight_name: quantized, "bias": offset})
        per_output = self.weights.strategy == "channel"
        register_scales(layer, self.scale_name, self.members, 1 if per_output else None)
        self.inputs.create(layer, site, self.members, in_features)
        self.bound = site.bind_kernel(
            int8_linear,
            in_features=in_features,
            out_features=out_features,
            x_scales=self.inputs.x_scales,
            weight_scales="channel" if per_output or len(self.members.sizes) > 1 else "tensor",
            asymmetric=self.inputs.asymmetric,
            biased=bias,
        )
        self.fused_kernel = self.inputs.fused_quantizer(self.bound.function, self._multiply)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * scale."""
        return layer.get_parameter(self.weight_name).double() * self._scale(
            layer
        ).double().unsqueeze(1)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: (quantized value - zero point) * scale."""
        return self.inputs.dequantized(layer, x)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Combine the input quantizer and the bound kernel; return function and constants.

        Raises: CheckpointError: a scale is not a positive number, or the stored input parameters of
            fused layers differ.
        """
        self.members.check(layer.get_parameter(self.scale_name), self.scale_name)
        static = self.inputs.stored(layer)
        constants = {
            "weight": layer.get_parameter(self.weight_name),
            "weight_scale": self._scale(layer),
            "bias": layer._parameters["bias"],
        }
        operands = prepare_operands(layer, self.bound, constants)
        return self.fused_kernel or self._project, (*operands, *static)

    def _scale(self, layer: nn.Module) -> torch.Tensor:
        """Return the weight's scales ``[O]`` or ``[1]``."""
        scale = layer.get_parameter(self.scale_name)
        # [O, 1] has one scale per output; [P] has one per fused layer.
        if scale.ndim == 2:
            return scale.squeeze(1)
        # The op takes one scale for the tensor or one per output, but not one per fused layer.
        return scale if len(scale) == 1 else self.members.per_output(scale)

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        *static: torch.Tensor | None,
    ) -> torch.Tensor:
        quantized, scale, zero_point = self.inputs.quantized(x, *static)
        return self.bound.function(
            quantized, weight, scale, weight_scale, zero_point, bias, self.dtype
        )

    def _multiply(
        self,
        quantized: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.bound.function(quantized, weight, scale, weight_scale, None, bias, self.dtype)
