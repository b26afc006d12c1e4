"""Linear layers of FP8 weights with one scale per block of the weight.

Dimensions: I input features, O output features; R rows and C columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer_ops.quantized_linear import CodedProduct, fp8_block_linear
from interposer_ops.quantizers import quantize_fp8_blocks
from interposer_quantization._compressed_tensors.parameters import prepare_operands
from interposer_quantization._fp8.parameters import (
    FORMAT,
    FORMAT_NAME,
    Members,
    check_block_rows,
    register,
)


class Fp8BlockLinear(LinearMethod):
    """Linear method for ``weight`` ``[O, I]`` float8_e4m3fn with one scale per R x C block.

    The scales ``[ceil(O / R), ceil(I / C)]`` are float32. Inputs are quantized in blocks of C.

    Attributes:
        power_of_two_scales: input scales are rounded up to powers of two, as the exporter did
            for the weight scales.
        scale_name: name of the parameter that holds the scales.

    Source: arXiv:2412.19437, 3.3.2; for the powers of two, ``act_quant`` in the inference code of
        DeepSeek-V3.1.
    """

    def __init__(
        self, block_rows: int, block_columns: int, power_of_two_scales: bool, scale_name: str
    ) -> None:
        self.block_rows = block_rows
        self.block_columns = block_columns
        self.power_of_two_scales = power_of_two_scales
        self.scale_name = scale_name

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight``, the scales and, if requested, ``bias``.

        Raises: ConfigError: a block crosses the boundary between two fused layers.
        """
        self.members = Members(layer, site, out_features)
        check_block_rows(site, self.members, self.block_rows)
        self.dtype = site.dtype
        self.quantize = site.bind(
            quantize_fp8_blocks,
            hidden_size=in_features,
            block_size=self.block_columns,
            out_dtype=FORMAT_NAME,
            power_of_two_scales=self.power_of_two_scales,
        )
        self.bound = site.bind_kernel(
            fp8_block_linear,
            in_features=in_features,
            out_features=out_features,
            block_rows=self.block_rows,
            block_columns=self.block_columns,
            x_dtype=FORMAT_NAME,
            weight_dtype=FORMAT_NAME,
            biased=bias,
        )
        # The last block of a row or column may be smaller, hence the ceiling division.
        num_rows, num_columns = -(-out_features // self.block_rows), self._columns(in_features)
        weight = torch.empty(out_features, in_features, dtype=FORMAT)
        scales = torch.empty(num_rows, num_columns, dtype=torch.float32)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        register(layer, **{"weight": weight, self.scale_name: scales, "bias": offset})

    def _columns(self, in_features: int) -> int:
        return -(-in_features // self.block_columns)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * block scale."""
        weight, scales = layer.get_parameter("weight"), layer.get_parameter(self.scale_name)
        out_features, in_features = weight.shape
        # Expanded to full blocks first, then trimmed to the weight's size.
        rows = scales.double().repeat_interleave(self.block_rows, 0)[:out_features]
        return weight.double() * rows.repeat_interleave(self.block_columns, 1)[:, :in_features]

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: quantized value * block scale."""
        quantized, scales = self._quantized(x)
        columns = scales.double().repeat_interleave(self.block_columns, -1)[..., : x.shape[-1]]
        return quantized.double() * columns

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Combine the input quantizer and the bound kernel; return function and constants.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter(self.scale_name)
        self.members.check(scales, self.scale_name)
        constants = {
            "weight": layer.get_parameter("weight"),
            "weight_scales": scales,
            "bias": layer._parameters["bias"],
        }
        # Positional arguments of the quantizer after x.
        options = self.block_columns, FORMAT, self.power_of_two_scales
        kernel = CodedProduct(self.quantize, self.bound.function, self._multiply, options)
        return kernel, prepare_operands(layer, self.bound, constants)

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.quantize(x, self.block_columns, FORMAT, self.power_of_two_scales)

    def _multiply(
        self,
        quantized: torch.Tensor,
        scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, columns = self.block_rows, self.block_columns
        return self.bound.function(
            quantized, weight, scales, weight_scales, rows, columns, bias, self.dtype
        )
