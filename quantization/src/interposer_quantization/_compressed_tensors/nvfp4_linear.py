"""Linear layers in NVFP4: 16 inputs share a scale in e4m3, all of a layer one in float32.

A weight is e2m1 * scale / global scale.
Dimensions: I input features, O output features, P layers of the checkpoint that are fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, LinearMethod, Site
from interposer_ops.quantized_linear import nvfp4_linear, w8a16_linear
from interposer_ops.quantizers import decode_e2m1, quantize_nvfp4, unpack_nibbles
from interposer_quantization._compressed_tensors.parameters import (
    common_number,
    final_operands,
    number_of_groups,
)
from interposer_quantization._compressed_tensors.stored import NVFP4_GROUP
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import FORMAT, Members, register, register_per_part

_PACKED, _SCALE, _GLOBAL = "weight_packed", "weight_scale", "weight_global_scale"
_INPUT = "input_global_scale"
_WHY = "quantize them together, so that they share it"


class Nvfp4Linear(LinearMethod):
    """Weights in NVFP4, inputs brought to it on the way.

    ``weight_packed`` is ``[O, I / 2]`` uint8 of two e2m1 codes, the first in the low nibble,
    ``weight_scale`` ``[O, I / 16]`` float8_e4m3fn; ``weight_global_scale`` and
    ``input_global_scale`` are ``[P]``, one number for layers that run as one product.
    """

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the codes, all scales and, if asked for, ``bias``.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        _register(layer, site, self.members, in_features)
        register_per_part(layer, _INPUT, len(self.members.sizes))
        register(layer, bias=torch.empty(out_features, dtype=site.dtype) if bias else None)
        # Its scale is a constant of the model, which a kernel may prepare.
        self.quantizer = site.bind_kernel(quantize_nvfp4, hidden_size=in_features)
        self.bound = site.bind_kernel(
            nvfp4_linear, in_features=in_features, out_features=out_features
        )

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each number times both its scales."""
        return _dequantized(layer, self.members)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each rounded number times both its scales."""
        scale = layer.get_parameter(_INPUT)[:1]
        packed, scales = quantize_nvfp4(x, scale)
        return _scaled(packed, scales.double() / scale.double())

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the quantizer and the bound kernel as one function, with its constants.

        Raises: CheckpointError: a scale is not a positive number, or layers that are fused
            disagree on a global one.
        """
        _check(layer, self.members)
        inputs = layer.get_parameter(_INPUT)
        self.members.check(inputs, _INPUT)
        scale = common_number(self.members, inputs, _INPUT, _WHY)
        weights = common_number(self.members, layer.get_parameter(_GLOBAL), _GLOBAL, _WHY)
        prepared = self.quantizer.prepared(global_scale=scale)["global_scale"]
        constants = {
            "weight": layer.get_parameter(_PACKED),
            "weight_scales": layer.get_parameter(_SCALE),
            "alpha": 1 / (scale * weights),
            "bias": layer._parameters["bias"],
        }
        return self._project, (*final_operands(layer, self.bound, constants), prepared)

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
        global_scale: Any,
    ) -> torch.Tensor:
        packed, scales = self.quantizer.function(x, global_scale)
        return self.bound.function(packed, scales, weight, weight_scales, alpha, bias, self.dtype)


class Nvfp4WeightLinear(WeightLinear):
    """Weights in NVFP4, multiplied in the model's dtype.

    Twice an e2m1 number is an integer, so that the op of int8 weights represents all of them
    exactly, in groups of 16.
    """

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> BoundKernel[Any, Any]:
        """Register the codes and all scales, and return a kernel for integers.

        Raises: ConfigError: groups do not divide the inputs.
        """
        num_groups = _register(layer, site, self.members, in_features)
        return site.bind_kernel(
            w8a16_linear,
            in_features=in_features,
            out_features=out_features,
            group_size=NVFP4_GROUP,
            num_groups=num_groups,
            asymmetric=False,
        )

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each number times both its scales."""
        return _dequantized(layer, self.members)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return twice the numbers as int8, and half of what both scales make.

        Raises: CheckpointError: a scale is not a positive number.
        """
        _check(layer, self.members)
        codes = unpack_nibbles(layer.get_parameter(_PACKED))
        doubled = (2 * decode_e2m1(codes, torch.float32)).to(torch.int8)
        scale = _scales(layer, self.members) / 2
        return {"weight": doubled, "scale": scale, "zero_points": None}


def _register(layer: nn.Module, site: Site, members: Members, in_features: int) -> int:
    """Register codes and scales of weights, and return the number of groups."""
    num_groups = number_of_groups(site, in_features, NVFP4_GROUP)
    rows = sum(members.sizes.values())
    register(
        layer,
        **{
            _PACKED: torch.empty(rows, in_features // 2, dtype=torch.uint8),
            _SCALE: torch.empty(rows, num_groups, dtype=FORMAT),
        },
    )
    register_per_part(layer, _GLOBAL, len(members.sizes))
    return num_groups


def _check(layer: nn.Module, members: Members) -> None:
    scales = layer.get_parameter(_SCALE).float()
    # A scale that was rounded to zero is that of a block of zeros.
    members.check(torch.where(scales == 0, 1, scales), _SCALE)
    members.check(layer.get_parameter(_GLOBAL), _GLOBAL)


def _scales(layer: nn.Module, members: Members) -> torch.Tensor:
    """Return ``[O, I / 16]`` float32: the scales of both levels as one."""
    by_output = members.per_output(layer.get_parameter(_GLOBAL)).unsqueeze(1)
    return layer.get_parameter(_SCALE).float() / by_output


def _dequantized(layer: nn.Module, members: Members) -> torch.Tensor:
    return _scaled(layer.get_parameter(_PACKED), _scales(layer, members).double())


def _scaled(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``[..., I]`` float64: e2m1 numbers times the scales of their groups."""
    numbers = decode_e2m1(unpack_nibbles(packed), torch.float64)
    blocks = numbers.unflatten(-1, (scales.shape[-1], NVFP4_GROUP))
    scaled: torch.Tensor = (blocks * scales.unsqueeze(-1)).flatten(-2)
    return scaled
