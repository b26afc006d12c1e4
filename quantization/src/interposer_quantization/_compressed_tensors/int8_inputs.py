"""Inputs of linear layers that are quantized to int8, and their stored scales.

Dimensions: I input features, P layers of the checkpoint that are fused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from interposer import Site
from interposer_ops.quantized_linear import CodedProduct, StaticProduct
from interposer_ops.quantizers import (
    quantize_int8_per_token,
    quantize_int8_per_token_asymmetric,
    quantize_int8_static,
)
from interposer_quantization._compressed_tensors.parameters import common_number
from interposer_quantization._compressed_tensors.stored import Inputs
from interposer_quantization._fp8.parameters import Members, register, register_per_part

_WHY = "calibrate them on the same input, or quantize inputs dynamically"


class Int8Inputs:
    """A scale per token, or ``input_scale`` ``[P]`` that is stored.

    Asymmetric ones have a zero point besides, ``input_zero_point`` ``[P]`` int8 where it is stored.
    What is stored of one input must agree.

    Attributes:
        static: whether the checkpoint stores scales.
        asymmetric: whether there are zero points.
        x_scales: what shares a scale, as the ops' dim of that name says it.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.static = inputs.static
        self.asymmetric = not inputs.symmetric
        self.x_scales = "tensor" if inputs.static else "token"

    def create(self, layer: nn.Module, site: Site, members: Members, in_features: int) -> None:
        """Register what is stored, and bind the quantizer."""
        self.members = members
        num_parts = len(members.sizes)
        if self.static:
            register_per_part(layer, "input_scale", num_parts)
            self.quantize_static = site.bind(
                quantize_int8_static, hidden_size=in_features, asymmetric=self.asymmetric
            )
            if self.asymmetric:
                register(layer, input_zero_point=torch.empty(num_parts, dtype=torch.int8))
                layer.get_parameter("input_zero_point").per_part = True  # type: ignore[attr-defined]
        elif self.asymmetric:
            self.quantize_asymmetric = site.bind(
                quantize_int8_per_token_asymmetric, hidden_size=in_features
            )
        else:
            self.quantize = site.bind(quantize_int8_per_token, hidden_size=in_features)

    def coded(
        self, product: Callable[..., torch.Tensor], multiply: Callable[..., torch.Tensor]
    ) -> CodedProduct | None:
        """Return the quantizer and a product as one kernel; None where there are zero points.

        Args:
            product, multiply: as ``CodedProduct`` has them.
        """
        if self.asymmetric:
            return None
        if self.static:
            return StaticProduct(self.quantize_static, product, multiply, (None,))
        return CodedProduct(self.quantize, product, multiply)

    def stored(self, layer: nn.Module) -> tuple[torch.Tensor | None, ...]:
        """Return the scale ``[1]`` of all inputs, and the zero point ``[1]`` int32 if there is one.

        Nothing where each token has its own.

        Raises: CheckpointError: a scale is not a positive number, or layers that are fused
            disagree on their common input.
        """
        if not self.static:
            return ()
        self.members.check(layer.get_parameter("input_scale"), "input_scale")
        scale, zero_point = self._static(layer)
        return (scale,) if zero_point is None else (scale, zero_point)

    def dequantized(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each integer less the zero point, scaled."""
        static = self._static(layer) if self.static else ()
        quantized, scale, zero_point = self.quantized(x, *static)
        integers = quantized.double()
        return (integers if zero_point is None else integers - zero_point) * scale.double()

    def quantized(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None = None,
        zero_point: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the integers, their scales and their zero points.

        Args:
            scale: what ``stored`` returned, as ``zero_point``.
        """
        if scale is not None:
            return self.quantize_static(x, scale, zero_point), scale, zero_point
        if self.asymmetric:
            return self.quantize_asymmetric(x)
        return (*self.quantize(x), None)

    def _static(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = common_number(self.members, layer.get_parameter("input_scale"), "input_scale", _WHY)
        if not self.asymmetric:
            return scale, None
        name = "input_zero_point"
        zero_point = common_number(self.members, layer.get_parameter(name), name, _WHY)
        return scale, zero_point.to(torch.int32)
