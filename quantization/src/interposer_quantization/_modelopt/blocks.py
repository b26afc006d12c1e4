"""Linear layers of floats of which small blocks share a scale, as ModelOpt stores them.

Dimensions: I input features, O output features, P layers of the checkpoint that are fused.

Source: ``NVFP4QTensor`` and ``MXFP8QTensor`` of NVIDIA ModelOpt 0.47 for what the tensors mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_ops.quantized_linear import CodedProduct, mxfp8_linear, nvfp4_linear
from interposer_ops.quantizers import (
    MX_BLOCK_SIZE,
    NVFP4_BLOCK_SIZE,
    decode_e2m1,
    decode_e8m0,
    quantize_fp8_blocks,
    quantize_nvfp4,
    unpack_nibbles,
)
from interposer_quantization._fp8.parameters import (
    FORMAT,
    FORMAT_NAME,
    Members,
    register,
    register_per_part,
)
from interposer_quantization._weights.packed_linear import register_stored

# The parameter that holds each constant of the ops.
_STORED = {"weight": "weight", "weight_scales": "weight_scale", "bias": "bias"}
# Exponents of scales that leave room for products in float16, for checks with random numbers.
_USUAL_EXPONENTS = (123, 128)
_MANTISSA_BITS = 23


class _BlockLinear(LinearMethod):
    """``weight`` and ``weight_scale`` ``[O, I / block_size]``."""

    block_size: ClassVar[int]

    @abstractmethod
    def _create(self, layer: nn.Module, site: Site, in_features: int, out_features: int) -> None:
        """Bind kernels and register what is stored, but for the bias."""

    @abstractmethod
    def _scales(self, layer: nn.Module) -> torch.Tensor:
        """Return the float32 numbers that ``weight_scale`` stands for."""

    @abstractmethod
    def _elements(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 numbers ``[O, I]`` that ``weight`` stands for, without scales."""

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight``, its scales and, if asked for, ``bias``.

        Raises: ConfigError: blocks do not divide the inputs.
        """
        if in_features % self.block_size:
            raise ConfigError(
                f"{site.prefix}: blocks of {self.block_size} do not divide its {in_features} "
                "inputs. Try: leave the layer out when the model is quantized"
            )
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        self._create(layer, site, in_features, out_features)
        register(layer, bias=torch.empty(out_features, dtype=site.dtype) if bias else None)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each number times the scale of its block."""
        scales = self._scales(layer).double()
        return self._elements(layer) * scales.repeat_interleave(self.block_size, 1)

    def _release(self, layer: nn.Module, prepared: dict[str, Any]) -> None:
        """Drop the parameters that a kernel wants otherwise: held twice they would take double."""
        for operand, name in _STORED.items():
            if prepared[operand] is not layer._parameters[name]:
                layer.register_parameter(name, None)


class MxFp8Linear(_BlockLinear):
    """``weight`` ``[O, I]`` float8_e4m3fn and ``weight_scale`` ``[O, I / 32]`` uint8 exponents.

    The scales of inputs are rounded up to powers of two, as those of the weights were, so that
    nothing saturates. The OCP specification rounds down instead.
    """

    block_size = MX_BLOCK_SIZE

    def _create(self, layer: nn.Module, site: Site, in_features: int, out_features: int) -> None:
        self.quantize = site.bind(
            quantize_fp8_blocks,
            hidden_size=in_features,
            block_size=self.block_size,
            out_dtype=FORMAT_NAME,
            power_of_two_scales=True,
        )
        self.bound = site.bind_kernel(
            mxfp8_linear, in_features=in_features, out_features=out_features
        )
        shape = (out_features, in_features // self.block_size)

        def sample(generator: torch.Generator) -> torch.Tensor:
            return torch.randint(*_USUAL_EXPONENTS, shape, generator=generator, dtype=torch.uint8)

        register(layer, weight=torch.empty(out_features, in_features, dtype=FORMAT))
        exponents = torch.empty(shape, dtype=torch.uint8)
        register_stored(layer, "weight_scale", exponents, sample=sample)

    def _scales(self, layer: nn.Module) -> torch.Tensor:
        return decode_e8m0(layer.get_parameter("weight_scale"), torch.float32)

    def _elements(self, layer: nn.Module) -> torch.Tensor:
        return layer.get_parameter("weight").double()

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each rounded number times its block's scale."""
        codes, scales = self.quantize(x, self.block_size, FORMAT, True)
        return codes.double() * scales.double().repeat_interleave(self.block_size, -1)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the quantizer and the bound kernel as one function, with its constants.

        Raises: CheckpointError: a scale is not a number.
        """
        self.members.check(self._scales(layer), "weight_scale")
        stored = {operand: layer._parameters[name] for operand, name in _STORED.items()}
        prepared = self.bound.prepared(**stored)
        self._release(layer, prepared)
        options = self.block_size, FORMAT, True
        kernel = CodedProduct(self.quantize, self.bound.function, self._multiply, options)
        return kernel, tuple(prepared[operand] for operand in _STORED)

    def _multiply(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        # The exponent of a float32 is biased as E8M0 is, and a power of two has nothing besides.
        exponents = (scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
        return self.bound.function(codes, exponents, weight, weight_scales, bias, self.dtype)


class NvFp4Linear(_BlockLinear):
    """``weight`` ``[O, I / 2]`` uint8 and ``weight_scale`` ``[O, I / 16]`` float8_e4m3fn.

    ``weight_scale_2`` and ``input_scale``, one number each for a layer of the checkpoint, are what
    the scales of all blocks are multiplied by. Where layers are fused they must agree, for one
    product has one of each.
    """

    block_size = NVFP4_BLOCK_SIZE

    def _create(self, layer: nn.Module, site: Site, in_features: int, out_features: int) -> None:
        self.quantizer = site.bind_kernel(quantize_nvfp4, hidden_size=in_features)
        self.bound = site.bind_kernel(
            nvfp4_linear, in_features=in_features, out_features=out_features
        )
        register(
            layer,
            weight=torch.empty(out_features, in_features // 2, dtype=torch.uint8),
            weight_scale=torch.empty(out_features, in_features // self.block_size, dtype=FORMAT),
        )
        for name in ("weight_scale_2", "input_scale"):
            register_per_part(layer, name, len(self.members.sizes))

    def _scales(self, layer: nn.Module) -> torch.Tensor:
        return layer.get_parameter("weight_scale").float()

    def _elements(self, layer: nn.Module) -> torch.Tensor:
        codes = unpack_nibbles(layer.get_parameter("weight"))
        overall = self.members.per_output(layer.get_parameter("weight_scale_2"))
        return decode_e2m1(codes, torch.float64) * overall.double().unsqueeze(1)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each code times the scales of block and input."""
        input_scale = layer.get_parameter("input_scale")[:1]
        constants = self.quantizer.prepared(global_scale=input_scale.reciprocal())
        packed, scales = self.quantizer.function(x, **constants)
        blocks = scales.double().repeat_interleave(self.block_size, -1)
        return decode_e2m1(unpack_nibbles(packed), torch.float64) * blocks * input_scale.double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the quantizer and the bound kernel as one function, with its constants.

        Raises: CheckpointError: a scale is negative or not a number, that of a whole layer zero,
            or layers that are fused disagree on the scale of the layer or of its input.
        """
        scales = self._scales(layer)
        # A block of zeros may have the scale zero.
        self.members.check(scales.masked_fill(scales == 0, 1), "weight_scale")
        weight_scale = self._common(layer, "weight_scale_2")
        input_scale = self._common(layer, "input_scale")
        stored = {operand: layer._parameters[name] for operand, name in _STORED.items()}
        prepared = self.bound.prepared(**stored, alpha=weight_scale * input_scale)
        self._release(layer, prepared)
        operands = ("weight", "weight_scales", "alpha", "bias")
        constants = self.quantizer.prepared(global_scale=input_scale.reciprocal())
        return self._project, (*(prepared[name] for name in operands), constants["global_scale"])

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
        global_scale: torch.Tensor,
    ) -> torch.Tensor:
        packed, scales = self.quantizer.function(x, global_scale)
        return self.bound.function(packed, scales, weight, weight_scales, alpha, bias, self.dtype)

    def _common(self, layer: nn.Module, name: str) -> torch.Tensor:
        """Return the one number ``[1]`` that all fused layers have."""
        numbers = layer.get_parameter(name)
        self.members.check(numbers, name)
        if not (numbers == numbers[0]).all():
            listed = ", ".join(
                f"{self.members.tensor(member, name)} = {float(number):.9g}"
                for member, number in zip(self.members.sizes, numbers, strict=True)
            )
            raise CheckpointError(
                self.members.tensor(next(iter(self.members.sizes)), name),
                f"layers of one input run as one product, which has one {name}: {listed}",
                "export the model with a release of ModelOpt that makes them equal",
            )
        return numbers[:1]
