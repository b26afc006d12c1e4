"""Linear layers of int8 weights that torchao multiplies by int8 inputs.

Dimensions: I input features, O output features.

Source: ``Int8Tensor`` and ``IntxUnpackedToInt8Tensor`` of torchao 0.18. The first one takes 127.5
for the largest symmetric code of an input where the op here takes 127.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import Site
from interposer_ops.quantized_linear import CodedProduct, int8_linear
from interposer_ops.quantizers import quantize_int8_per_token, quantize_int8_per_token_asymmetric
from interposer_quantization._compressed_tensors.parameters import final_operands
from interposer_quantization._torchao.linear import TorchAoLinear

_WEIGHT, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"


class TorchAoInt8Linear(TorchAoLinear):
    """``_weight_qdata`` ``[O, I]`` int8, ``_weight_scale`` ``[O, 1]``, zero points that are 0.

    Inputs get a scale per token and, if they are asymmetric, a zero point.
    """

    def _bind(self, site: Site, in_features: int, out_features: int, size: int) -> None:
        self.dtype = site.dtype
        asymmetric = self.weights.inputs == "asymmetric"
        if asymmetric:
            # Codes, scales and, if asymmetric, zero points.
            self.quantize: Callable[[torch.Tensor], Any] = site.bind(
                quantize_int8_per_token_asymmetric, hidden_size=in_features
            )
        else:
            self.quantize = site.bind(quantize_int8_per_token, hidden_size=in_features)
        self.bound = site.bind_kernel(
            int8_linear,
            in_features=in_features,
            out_features=out_features,
            x_scales="token",
            weight_scales="channel",
            asymmetric=asymmetric,
        )
        self.coded = (
            None if asymmetric else CodedProduct(self.quantize, self.bound.function, self._multiply)
        )

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each code less its zero point, scaled."""
        codes, scale, *zeros = self.quantize(x)
        integers = codes.double() - zeros[0] if zeros else codes.double()
        found: torch.Tensor = integers * scale.double()
        return found

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the quantizer and the bound kernel as one function, with its constants.

        Raises: CheckpointError: a scale is not a positive number, or a zero point not 0.
        """
        self.members.check(layer.get_parameter(_SCALE), _SCALE)
        self._check_symmetric(layer.get_parameter(_ZERO))
        constants = {
            "weight": layer.get_parameter(_WEIGHT),
            "weight_scale": layer.get_parameter(_SCALE).data.squeeze(1),
            "bias": layer._parameters["bias"],
        }
        return self.coded or self._project, final_operands(layer, self.bound, constants)

    def _multiply(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        product: torch.Tensor = self.bound.function(
            codes, weight, scale, weight_scale, None, bias, self.dtype
        )
        return product

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        codes, scale, *zeros = self.quantize(x)
        product: torch.Tensor = self.bound.function(
            codes, weight, scale, weight_scale, zeros[0] if zeros else None, bias, self.dtype
        )
        return product
