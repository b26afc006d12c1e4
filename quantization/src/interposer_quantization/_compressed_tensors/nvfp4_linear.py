"""Linear layers in NVFP4: one e4m3 scale per 16 inputs and one float32 scale per layer.

weight = e2m1 value * group scale / global scale.
Dimensions: I input features, O output features, P fused layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, LinearMethod, Site
from interposer.records import OpEntry
from interposer_ops.layers.choice_notes import annotate_place
from interposer_ops.quantized_linear import nvfp4_linear
from interposer_ops.quantizers import (
    decode_e2m1,
    dequantize_nvfp4,
    quantize_nvfp4,
    unpack_nibbles,
)
from interposer_quantization._compressed_tensors.parameters import (
    count_groups,
    prepare_operands,
    shared_scalar,
)
from interposer_quantization._compressed_tensors.stored import NVFP4_GROUP, Inputs
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import FORMAT, Members, register, register_per_part
from interposer_quantization._weights.weight_only import bind_weight_only

_SCALE = "weight_scale"
_NOT_CALLED = (
    "not called: the weight is converted to int8 and multiplied by dequantized inputs. "
    "Config(dequantize=False) keeps the weight in 4 bits"
)


@dataclass(frozen=True, slots=True)
class Nvfp4Storage:
    """Tensor names and conventions of one NVFP4 checkpoint format.

    Attributes:
        packed: name of the weight: two e2m1 values per byte, the first in the low nibble.
        tensor_scale, input_scale: names of the global scales, one number per fused layer.
        divides: the global scales divide, else they multiply.
        mend: advice in the error for fused layers with different global scales.
    """

    packed: str = "weight_packed"
    tensor_scale: str = "weight_global_scale"
    input_scale: str = "input_global_scale"
    divides: bool = True
    mend: str = "quantize the fused layers with one global scale"

    def register(self, layer: nn.Module, site: Site, members: Members, in_features: int) -> int:
        """Register the packed weight and scales; return the number of groups."""
        num_groups = count_groups(site, in_features, NVFP4_GROUP)
        rows = sum(members.sizes.values())
        packed = torch.empty(rows, in_features // 2, dtype=torch.uint8)
        scales = torch.empty(rows, num_groups, dtype=FORMAT)
        register(layer, **{self.packed: packed, _SCALE: scales})
        register_per_part(layer, self.tensor_scale, len(members.sizes))
        return num_groups

    def check(self, layer: nn.Module, members: Members) -> None:
        """Raise CheckpointError if a scale is not a positive number."""
        scales = layer.get_parameter(_SCALE).float()
        # An e4m3 scale of zero is valid: it belongs to a group of zeros.
        members.check(torch.where(scales == 0, 1, scales), _SCALE)
        members.check(layer.get_parameter(self.tensor_scale), self.tensor_scale)

    def scales(self, layer: nn.Module, members: Members) -> torch.Tensor:
        """Return the product of group and global scales ``[O, I / 16]`` float32."""
        by_output = members.per_output(layer.get_parameter(self.tensor_scale)).unsqueeze(1)
        scales = layer.get_parameter(_SCALE).float()
        return scales / by_output if self.divides else scales * by_output

    def dequantized(
        self, layer: nn.Module, members: Members, *, exact: bool = False
    ) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * group scale * global scale.

        Args:
            exact: multiply group and global scale in float64, without rounding to float32.
        """
        scales = self.scales(layer, members).double()
        if exact:
            by_output = members.per_output(layer.get_parameter(self.tensor_scale)).double()
            scales = layer.get_parameter(_SCALE).double() * by_output.unsqueeze(1)
        return _dequantize(layer.get_parameter(self.packed), scales)


COMPRESSED = Nvfp4Storage()
MODELOPT = Nvfp4Storage(
    "weight",
    "weight_scale_2",
    "input_scale",
    divides=False,
    mend="export the model with a release of ModelOpt that gives fused layers one global scale",
)


class Nvfp4Linear(LinearMethod):
    """Linear method for NVFP4 weights and inputs that are quantized to NVFP4.

    The packed weight is ``[O, I / 2]`` and ``weight_scale`` is ``[O, I / 16]`` float8_e4m3fn. The
    global scales of weight and input are ``[P]`` and must be equal among fused layers.

    If only the reference kernel supports NVFP4 matmul, the weight is converted to int8 and the
    inputs are dequantized. The result is the same, because int8 represents every e2m1 value.
    """

    parts_agree = True

    def __init__(self, storage: Nvfp4Storage = COMPRESSED) -> None:
        self.storage = storage

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the packed weight, all scales and, if requested, ``bias``.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        self.storage.register(layer, site, self.members, in_features)
        register_per_part(layer, self.storage.input_scale, len(self.members.sizes))
        register(layer, bias=torch.empty(out_features, dtype=site.dtype) if bias else None)
        # Bound with bind_kernel: the global scale is a constant that the kernel can prepare.
        self.quantizer = site.bind_kernel(quantize_nvfp4, hidden_size=in_features)
        sizes = {"in_features": in_features, "out_features": out_features}
        self.bound = site.bind_kernel(nvfp4_linear, **sizes, biased=bias)
        self.int8_fallback: BoundKernel[Any, Any] | None = None
        choice = self.bound.choice
        # A reference that was chosen without a pin or preference means: no kernel supports NVFP4.
        is_slow = isinstance(choice.chosen.record, OpEntry) and not choice.wished
        if is_slow and site.resolver.config.dequantize:
            annotate_place(site, _NOT_CALLED, op=nvfp4_linear.name, idle=True)
            sizes_and_group = in_features, out_features, NVFP4_GROUP
            self.int8_fallback = bind_weight_only(site, 8, *sizes_and_group, biased=bias)
            self.input_dequantizer = site.bind_kernel(dequantize_nvfp4, hidden_size=in_features)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * group scale * global scale."""
        return self.storage.dequantized(layer, self.members, exact=not self.storage.divides)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: quantized value * group scale * global scale."""
        global_scale = layer.get_parameter(self.storage.input_scale)[:1]
        # quantize_nvfp4 multiplies by its global scale, so a dequantization scale is inverted.
        packed, scales = quantize_nvfp4(
            x, global_scale if self.storage.divides else 1 / global_scale
        )
        group_scales, factor = scales.double(), global_scale.double()
        return _dequantize(
            packed, group_scales / factor if self.storage.divides else group_scales * factor
        )

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Combine the input quantizer and the bound kernel; return function and constants.

        Raises: CheckpointError: a scale is not a positive number, or the global scales of fused
            layers differ.
        """
        storage = self.storage
        storage.check(layer, self.members)
        self.members.check(layer.get_parameter(storage.input_scale), storage.input_scale)
        scale, weight_scale = (
            shared_scalar(self.members, layer.get_parameter(name), name, storage.mend)
            for name in (storage.input_scale, storage.tensor_scale)
        )
        # alpha undoes the global scales of both the input and the weight.
        alpha = 1 / (scale * weight_scale) if storage.divides else weight_scale * scale
        # The quantizer expects the dividing convention.
        scale = scale if storage.divides else scale.reciprocal()
        prepared = self.quantizer.prepared(global_scale=scale)["global_scale"]
        if self.int8_fallback is not None:
            # The input's global scale is part of alpha, so the dequantizer takes 1 instead.
            unit = torch.ones_like(scale)
            unit_scale = self.input_dequantizer.prepared(global_scale=unit)["global_scale"]
            constants = {
                "weight": _doubled_int8(layer.get_parameter(storage.packed)),
                "scale": layer.get_parameter(_SCALE).float() * (alpha / 2),
                "bias": layer._parameters["bias"],
                "zero_points": None,
            }
            operands = prepare_operands(layer, self.int8_fallback, constants)
            return self._project_int8, (*operands, prepared, unit_scale)
        constants = {
            "weight": layer.get_parameter(storage.packed),
            "weight_scales": layer.get_parameter(_SCALE),
            "alpha": alpha,
            "bias": layer._parameters["bias"],
        }
        return self._project, (*prepare_operands(layer, self.bound, constants), prepared)

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

    def _project_int8(self, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        """Multiply the dequantized input by the int8 weight with its combined scales."""
        *weight_operands, global_scale, unit_scale = operands
        quantized = self.quantizer.function(x, global_scale)
        # e2m1 value times e4m3 scale has at most six significant bits: exact in every dtype.
        dequantized = self.input_dequantizer.function(*quantized, unit_scale, x.dtype)
        return self.int8_fallback.function(dequantized, *weight_operands)  # type: ignore[union-attr, no-any-return]


class Nvfp4WeightLinear(WeightLinear):
    """Linear method for NVFP4 weights with inputs in the model's dtype.

    Twice an e2m1 value is an integer, so the op for int8 weights with groups of 16 represents the
    weight exactly.
    """

    def __init__(self, inputs: Inputs | None, storage: Nvfp4Storage = COMPRESSED) -> None:
        super().__init__(inputs)
        self.storage = storage

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register the packed weight and all scales, and bind the int8 weight-only kernel.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.storage.register(layer, site, self.members, in_features)
        sizes = in_features, out_features, NVFP4_GROUP
        return bind_weight_only(site, 8, *sizes, biased=bias)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: quantized value * group scale * global scale."""
        return self.storage.dequantized(layer, self.members)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the doubled weight as int8, with halved scales.

        Raises: CheckpointError: a scale is not a positive number.
        """
        self.storage.check(layer, self.members)
        doubled = _doubled_int8(layer.get_parameter(self.storage.packed))
        scale = self.storage.scales(layer, self.members) / 2
        return {"weight": doubled, "scale": scale, "zero_points": None}


def _doubled_int8(packed: torch.Tensor) -> torch.Tensor:
    """Unpack e2m1 values and double each value, ``[O, I]`` int8."""
    return (2 * decode_e2m1(unpack_nibbles(packed), torch.float32)).to(torch.int8)


def _dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Unpack e2m1 values and multiply by the group scales, ``[..., I]`` float64."""
    values = decode_e2m1(unpack_nibbles(packed), torch.float64)
    blocks = values.unflatten(-1, (scales.shape[-1], NVFP4_GROUP))
    scaled: torch.Tensor = (blocks * scales.unsqueeze(-1)).flatten(-2)
    return scaled
