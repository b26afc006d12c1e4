"""Linear layers of int8 weights that are multiplied by int8 inputs.

Dimensions: I input features, O output features, P layers of the checkpoint that are fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer_ops.int8_linear import int8_linear
from interposer_ops.int8_quantizers import (
    quantize_int8_per_token,
    quantize_int8_per_token_asymmetric,
    quantize_int8_static,
)
from interposer_quantization.compressed_parameters import (
    common_number,
    final_operands,
    register_scales,
)
from interposer_quantization.compressed_stored import Inputs, Weights
from interposer_quantization.fp8_parameters import Members, register, register_per_part

__all__ = ["Int8Linear"]

_WHY = "calibrate them on the same input, or quantize inputs dynamically"


class Int8Linear(LinearMethod):
    """``weight`` ``[O, I]`` int8 with ``weight_scale`` ``[O, 1]``, or ``[P]``: one of a layer.

    Inputs get a scale per token, or ``input_scale`` ``[P]``; asymmetric ones a zero point besides,
    ``input_zero_point`` ``[P]`` int8 where it is stored. What is stored of one input must agree.
    """

    def __init__(self, weights: Weights, inputs: Inputs) -> None:
        self.weights = weights
        self.inputs = inputs

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight``, the scales, what inputs need and, if asked for, ``bias``."""
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        num_parts = len(self.members.sizes)
        register(
            layer,
            weight=torch.empty(out_features, in_features, dtype=torch.int8),
            bias=torch.empty(out_features, dtype=site.dtype) if bias else None,
        )
        per_output = self.weights.strategy == "channel"
        register_scales(layer, "weight_scale", self.members, 1 if per_output else None)
        asymmetric = not self.inputs.symmetric
        if self.inputs.static:
            register_per_part(layer, "input_scale", num_parts)
            self.quantize_static = site.bind(
                quantize_int8_static, hidden_size=in_features, asymmetric=asymmetric
            )
            if asymmetric:
                register(layer, input_zero_point=torch.empty(num_parts, dtype=torch.int8))
                layer.get_parameter("input_zero_point").per_part = True  # type: ignore[attr-defined]
        elif asymmetric:
            self.quantize_asymmetric = site.bind(
                quantize_int8_per_token_asymmetric, hidden_size=in_features
            )
        else:
            self.quantize = site.bind(quantize_int8_per_token, hidden_size=in_features)
        self.bound = site.bind_kernel(
            int8_linear,
            in_features=in_features,
            out_features=out_features,
            x_scales="tensor" if self.inputs.static else "token",
            weight_scales="channel" if per_output or num_parts > 1 else "tensor",
            asymmetric=asymmetric,
        )

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each integer times its scale."""
        return layer.get_parameter("weight").double() * self._scale(layer).double().unsqueeze(1)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each integer less the zero point, scaled."""
        if self.inputs.static:
            scale, zero_point = self._static(layer)
            quantized = self.quantize_static(x, scale, zero_point)
        else:
            quantized, scale, zero_point = self._quantized(x)
        integers = quantized.double()
        return (integers if zero_point is None else integers - zero_point) * scale.double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the quantizer and the bound kernel as one function, with its constants.

        Raises: CheckpointError: a scale is not a positive number, or layers that are fused
            disagree on their common input.
        """
        self.members.check(layer.get_parameter("weight_scale"), "weight_scale")
        static = None
        if self.inputs.static:
            self.members.check(layer.get_parameter("input_scale"), "input_scale")
            static = self._static(layer)
        constants = {
            "weight": layer.get_parameter("weight"),
            "weight_scale": self._scale(layer),
            "bias": layer._parameters["bias"],
        }
        operands = final_operands(layer, self.bound, constants)
        if static is None:
            return self._project_per_token, operands
        return self._project_static, (*operands, *static)

    def _scale(self, layer: nn.Module) -> torch.Tensor:
        """Return the weight's scales ``[O]`` or ``[1]``."""
        scale = layer.get_parameter("weight_scale")
        if scale.ndim == 2:
            return scale.squeeze(1)
        return scale if len(scale) == 1 else self.members.per_output(scale)

    def _static(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale ``[1]`` and the zero point ``[1]`` int32 of all inputs."""
        scale = common_number(self.members, layer.get_parameter("input_scale"), "input_scale", _WHY)
        if self.inputs.symmetric:
            return scale, None
        name = "input_zero_point"
        zero_point = common_number(self.members, layer.get_parameter(name), name, _WHY)
        return scale, zero_point.to(torch.int32)

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return (*self.quantize(x), None) if self.inputs.symmetric else self.quantize_asymmetric(x)

    def _project_per_token(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        quantized, scale, zero_point = self._quantized(x)
        return self.bound.function(
            quantized, weight, scale, weight_scale, zero_point, bias, self.dtype
        )

    def _project_static(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
    ) -> torch.Tensor:
        quantized = self.quantize_static(x, scale, zero_point)
        return self.bound.function(
            quantized, weight, scale, weight_scale, zero_point, bias, self.dtype
        )
