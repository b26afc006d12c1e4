"""Linear layers of 8-bit floats as torchao stores them in safetensors.

Dimensions: I input features, O output features.

Source: ``Float8Tensor`` of torchao 0.18, quantized per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, LinearMethod, Site
from interposer_ops.linear import linear
from interposer_ops.quantized_linear import CodedProduct, fp8_linear
from interposer_ops.quantizers import quantize_fp8_per_token
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import FORMAT, FORMAT_NAME, Members, register

_NAMES = {"weight": "_weight_qdata", "weight_scale": "_weight_scale", "bias": "bias"}


class TorchAoFp8Linear(LinearMethod):
    """``_weight_qdata`` ``[O, I]`` float8_e4m3fn and ``_weight_scale`` ``[O, 1]``.

    Inputs get a scale per token, which is held in float32, whatever the dtype of the model.
    """

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register what is stored and, if asked for, ``bias``."""
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        self.quantize = site.bind(
            quantize_fp8_per_token, hidden_size=in_features, out_dtype=FORMAT_NAME, limited=False
        )
        self.bound = site.bind_kernel(
            fp8_linear,
            in_features=in_features,
            out_features=out_features,
            x_dtype=FORMAT_NAME,
            weight_dtype=FORMAT_NAME,
            x_scales="token",
            weight_scales="channel",
        )
        tensors = {
            "weight": torch.empty(out_features, in_features, dtype=FORMAT),
            "weight_scale": torch.empty(out_features, 1, dtype=torch.float32),
            "bias": torch.empty(out_features, dtype=site.dtype) if bias else None,
        }
        register(layer, **{_NAMES[operand]: tensor for operand, tensor in tensors.items()})

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each number times the scale of its output."""
        weight, scale = (layer.get_parameter(_NAMES[n]) for n in ("weight", "weight_scale"))
        return weight.double() * scale.double()

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each rounded number times its token's scale."""
        quantized, scale = self.quantize(x, FORMAT, None)
        return quantized.double() * scale.double()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the quantizer and the bound kernel as one function, with its constants.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scale = layer.get_parameter(_NAMES["weight_scale"])
        self.members.check(scale, _NAMES["weight_scale"])
        stored = {operand: layer._parameters[name] for operand, name in _NAMES.items()}
        prepared = self.bound.prepared(**{**stored, "weight_scale": scale.squeeze(1)})
        for operand, name in _NAMES.items():
            if prepared[operand] is not stored[operand]:
                # The prepared copy replaces it; held twice it would double the memory.
                layer.register_parameter(name, None)
        kernel = CodedProduct(self.quantize, self.bound.function, self._multiply, (FORMAT, None))
        return kernel, tuple(prepared[operand] for operand in _NAMES)

    def _multiply(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.bound.function(codes, weight, scale, weight_scale, bias, self.dtype)


class TorchAoFp8WeightLinear(WeightLinear):
    """``_weight_qdata`` ``[O, I]`` float8_e4m3fn and ``_weight_scale`` ``[O, 1]``, inputs plain.

    No op multiplies plain inputs by such weights. So they are brought to the model's dtype once,
    when the layer is finalized, and take its memory from then on.
    """

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> BoundKernel[Any, Any]:
        """Register the numbers and their scales, and return a kernel for plain weights."""
        weight = torch.empty(out_features, in_features, dtype=FORMAT)
        scale = torch.empty(out_features, 1, dtype=torch.float32)
        register(layer, **{_NAMES["weight"]: weight, _NAMES["weight_scale"]: scale})
        return site.bind_kernel(linear, in_features=in_features, out_features=out_features)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]`` that is multiplied by, in the model's dtype."""
        return self._plain(layer).double()

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the weight in the model's dtype.

        Raises: CheckpointError: a scale is not a positive number.
        """
        name = _NAMES["weight_scale"]
        self.members.check(layer.get_parameter(name), name)
        return {"weight": self._plain(layer)}

    def _plain(self, layer: nn.Module) -> torch.Tensor:
        weight, scale = (layer.get_parameter(_NAMES[n]) for n in ("weight", "weight_scale"))
        return (weight.float() * scale).to(self.dtype)
