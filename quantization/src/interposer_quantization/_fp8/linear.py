"""Linear layers of FP8 weights with one scale per fused layer or per output.

Dimensions: I input features, O output features, P fused layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer_ops.quantized_linear import CodedProduct, StaticProduct, fp8_linear
from interposer_ops.quantizers import quantize_fp8_per_token, quantize_fp8_static
from interposer_quantization._compressed_tensors.parameters import prepare_operands, shared_scalar
from interposer_quantization._fp8.parameters import (
    FORMAT,
    FORMAT_NAME,
    Members,
    register,
    register_per_part,
)

_MEND = "calibrate them on the same input, or quantize inputs dynamically"


class _Fp8Linear(LinearMethod):
    """Linear method for ``weight`` ``[O, I]`` float8_e4m3fn with per-tensor or per-output scales.

    Attributes:
        weight_scale: name of the parameter that holds the weight's scales.
        input_scale: name of the parameter that holds the static input scale; None if inputs are
            quantized per token.
        scale_limit: upper bound of a token's scale, or None.
        mend: advice in the error for fused layers with different input scales.
        weight: name of the parameter that holds the weight.
    """

    def __init__(
        self,
        weight_scale: str,
        input_scale: str | None = None,
        scale_limit: float | None = None,
        mend: str = _MEND,
        weight: str = "weight",
    ) -> None:
        self.weight = weight
        self.weight_scale = weight_scale
        self.input_scale = input_scale
        # A static input scale must be the same for all fused layers, because they share the input.
        self.parts_agree = input_scale is not None
        self.scale_limit = scale_limit
        self.mend = mend

    @abstractmethod
    def _create_scale(self, layer: nn.Module) -> bool:
        """Register the weight's scales; return whether there is one scale per output."""

    @abstractmethod
    def _scale(self, layer: nn.Module) -> torch.Tensor:
        """Return the weight's scales ``[O]`` or ``[1]``."""

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight``, the scales and, if requested, ``bias``."""
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        weight = torch.empty(out_features, in_features, dtype=FORMAT)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        register(layer, **{self.weight: weight, "bias": offset})
        per_output = self._create_scale(layer)
        if self.input_scale is not None:
            register_per_part(layer, self.input_scale, len(self.members.sizes))
            self.quantize_static = site.bind(
                quantize_fp8_static, hidden_size=in_features, out_dtype=FORMAT_NAME
            )
        else:
            self.quantize_per_token = site.bind(
                quantize_fp8_per_token,
                hidden_size=in_features,
                out_dtype=FORMAT_NAME,
                limited=self.scale_limit is not None,
            )
        self.bound = site.bind_kernel(
            fp8_linear,
            in_features=in_features,
            out_features=out_features,
            x_dtype=FORMAT_NAME,
            weight_dtype=FORMAT_NAME,
            x_scales="token" if self.input_scale is None else "tensor",
            weight_scales="channel" if per_output else "tensor",
            biased=bias,
        )
        # An emulated matmul takes float inputs, so only a real kernel can accept FP8 inputs.
        if self.input_scale is not None and not self.bound.choice.chosen.emulation:
            self.input_codes = FORMAT

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * scale."""
        return layer.get_parameter(self.weight).double() * self._scale(layer).double().unsqueeze(1)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: quantized value * scale."""
        if self.input_scale is not None:
            # All entries are equal; finalize checks it.
            scale = layer.get_parameter(self.input_scale)[:1]
            return self.quantize_static(x, scale, FORMAT).double() * scale.double()
        quantized, scale = self.quantize_per_token(x, FORMAT, self.scale_limit)
        return quantized.double() * scale.double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Combine the input quantizer and the bound kernel; return function and constants.

        Raises: CheckpointError: a scale is not a positive number, or fused layers have different
            input scales.
        """
        self.members.check(layer.get_parameter(self.weight_scale), self.weight_scale)
        static: tuple[torch.Tensor, ...] = ()
        if self.input_scale is not None:
            input_scales = layer.get_parameter(self.input_scale)
            self.members.check(input_scales, self.input_scale)
            name, mend = self.input_scale, self.mend
            static = (shared_scalar(self.members, input_scales, name, mend),)
        constants = {
            "weight": layer.get_parameter(self.weight),
            "weight_scale": self._scale(layer),
            "bias": layer._parameters["bias"],
        }
        operands = prepare_operands(layer, self.bound, constants)
        matmul = self.bound.function
        # The preceding layer quantizes the input, so this kernel gets quantized values.
        if self.takes_codes:
            return self._multiply, (*static, *operands)
        if static:
            kernel = StaticProduct(self.quantize_static, matmul, self._multiply, (FORMAT,))
            return kernel, (*operands, *static)
        options = FORMAT, self.scale_limit
        return CodedProduct(self.quantize_per_token, matmul, self._multiply, options), operands

    def _multiply(
        self,
        quantized: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.bound.function(quantized, weight, scale, weight_scale, bias, self.dtype)


class Fp8TensorLinear(_Fp8Linear):
    """FP8 linear method with one weight scale per fused layer.

    The outputs of each fused layer use that layer's scale, so no weight is requantized.
    """

    def _create_scale(self, layer: nn.Module) -> bool:
        num_parts = len(self.members.sizes)
        register_per_part(layer, self.weight_scale, num_parts)
        return num_parts > 1

    def _scale(self, layer: nn.Module) -> torch.Tensor:
        scale = layer.get_parameter(self.weight_scale)
        return scale if len(scale) == 1 else self.members.per_output(scale)


class Fp8RowLinear(_Fp8Linear):
    """FP8 linear method with one weight scale per output: ``[O, 1]``, or ``[O]`` if ``flat``.

    Args:
        largest_input: clamp for the magnitudes that determine a token's scale; larger inputs
            saturate.
        input_scale: name of the parameter with the static input scale, if there is one.
    """

    def __init__(
        self,
        largest_input: float | None = None,
        input_scale: str | None = None,
        *,
        flat: bool = False,
        weight: str = "weight",
        weight_scale: str = "weight_scale",
    ) -> None:
        # The largest FP8 value times this scale is largest_input.
        limit = None if largest_input is None else largest_input / torch.finfo(FORMAT).max
        super().__init__(weight_scale, input_scale, limit, weight=weight)
        self.flat = flat

    def _create_scale(self, layer: nn.Module) -> bool:
        out_features = sum(self.members.sizes.values())
        shape = (out_features,) if self.flat else (out_features, 1)
        register(layer, **{self.weight_scale: torch.empty(shape, dtype=torch.float32)})
        return True

    def _scale(self, layer: nn.Module) -> torch.Tensor:
        scale = layer.get_parameter(self.weight_scale)
        return scale if self.flat else scale.squeeze(1)
