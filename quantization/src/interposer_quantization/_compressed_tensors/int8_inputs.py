"""Quantization of a linear layer's inputs to int8, with static scales or one per token.

Dimensions: I input features, P fused layers.
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
from interposer_quantization._compressed_tensors.parameters import shared_scalar
from interposer_quantization._compressed_tensors.stored import Inputs
from interposer_quantization._fp8.parameters import Members, register, register_per_part

_WHY = "calibrate them on the same input, or quantize inputs dynamically"


class Int8Inputs:
    """Int8 quantization of inputs: one scale per token, or a stored ``input_scale`` ``[P]``.

    Asymmetric quantization adds a zero point; a static one is stored as ``input_zero_point``
    ``[P]`` int8. Fused layers share one input, so the stored numbers must be equal.

    Attributes:
        static: the checkpoint stores scales.
        asymmetric: quantization uses zero points.
        x_scales: value of the ops' dim ``x_scales``: "tensor" or "token".
    """

    def __init__(self, inputs: Inputs) -> None:
        self.static = inputs.static
        self.asymmetric = not inputs.symmetric
        self.x_scales = "tensor" if inputs.static else "token"

    def create(self, layer: nn.Module, site: Site, members: Members, in_features: int) -> None:
        """Register the stored input parameters and bind the quantizer."""
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

    def fused_quantizer(
        self, product: Callable[..., torch.Tensor], multiply: Callable[..., torch.Tensor]
    ) -> CodedProduct | None:
        """Return one kernel that quantizes and multiplies, or None for asymmetric inputs.

        Args:
            product, multiply: as in ``CodedProduct``.
        """
        # CodedProduct takes no zero points, so asymmetric inputs are quantized in a separate call.
        if self.asymmetric:
            return None
        if self.static:
            return StaticProduct(self.quantize_static, product, multiply, (None,))
        return CodedProduct(self.quantize, product, multiply)

    def stored(self, layer: nn.Module) -> tuple[torch.Tensor | None, ...]:
        """Return the static scale ``[1]`` and, if asymmetric, the zero point ``[1]`` int32.

        Returns an empty tuple if each token has its own scale.

        Raises: CheckpointError: a scale is not a positive number, or the stored numbers of fused
            layers differ.
        """
        if not self.static:
            return ()
        self.members.check(layer.get_parameter("input_scale"), "input_scale")
        scale, zero_point = self._static(layer)
        return (scale,) if zero_point is None else (scale, zero_point)

    def dequantized(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: (quantized value - zero point) * scale."""
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
        """Quantize ``x`` and return the int8 values, the scales and the zero points.

        Args:
            scale, zero_point: the results of ``stored`` for static quantization.
        """
        if scale is not None:
            return self.quantize_static(x, scale, zero_point), scale, zero_point
        if self.asymmetric:
            return self.quantize_asymmetric(x)
        return (*self.quantize(x), None)

    def _static(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = shared_scalar(self.members, layer.get_parameter("input_scale"), "input_scale", _WHY)
        if not self.asymmetric:
            return scale, None
        name = "input_zero_point"
        zero_point = shared_scalar(self.members, layer.get_parameter(name), name, _WHY)
        return scale, zero_point.to(torch.int32)
