"""Linear layers in NVFP4: 16 inputs share a scale in e4m3, all of a layer one in float32.

A weight is e2m1 * scale / global scale.
Dimensions: I input features, O output features, P layers of the checkpoint that are fused.
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
    DIFFERENT,
    common_number,
    final_operands,
    number_of_groups,
)
from interposer_quantization._compressed_tensors.stored import NVFP4_GROUP, Inputs
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import FORMAT, Members, register, register_per_part
from interposer_quantization._weights.weight_only import bind_weight_only

_SCALE = "weight_scale"
_NOT_CALLED = (
    "not called: weights are held in 8 bits, and multiplied by the numbers that the codes of "
    "inputs stand for. Config(dequantize=False) keeps them in 4 bits"
)


@dataclass(frozen=True, slots=True)
class Nvfp4Storage:
    """The tensors of a format.

    Attributes:
        packed: two e2m1 codes a byte, the first in the low nibble.
        tensor_scale, input_scale: one number for a layer of the checkpoint.
        divides: numbers are divided by these two, else multiplied.
        problem, mend: what is wrong where fused layers disagree on these, and what to do.
    """

    packed: str = "weight_packed"
    tensor_scale: str = "weight_global_scale"
    input_scale: str = "input_global_scale"
    divides: bool = True
    problem: str = DIFFERENT
    mend: str = "quantize them together, so that they share it"

    def register(self, layer: nn.Module, site: Site, members: Members, in_features: int) -> int:
        """Register codes and scales of weights, and return the number of groups."""
        num_groups = number_of_groups(site, in_features, NVFP4_GROUP)
        rows = sum(members.sizes.values())
        packed = torch.empty(rows, in_features // 2, dtype=torch.uint8)
        scales = torch.empty(rows, num_groups, dtype=FORMAT)
        register(layer, **{self.packed: packed, _SCALE: scales})
        register_per_part(layer, self.tensor_scale, len(members.sizes))
        return num_groups

    def check(self, layer: nn.Module, members: Members) -> None:
        """Raise CheckpointError if a scale is not a positive number."""
        scales = layer.get_parameter(_SCALE).float()
        # A scale that was rounded to zero is that of a block of zeros.
        members.check(torch.where(scales == 0, 1, scales), _SCALE)
        members.check(layer.get_parameter(self.tensor_scale), self.tensor_scale)

    def scales(self, layer: nn.Module, members: Members) -> torch.Tensor:
        """Return ``[O, I / 16]`` float32: the scales of both levels as one."""
        by_output = members.per_output(layer.get_parameter(self.tensor_scale)).unsqueeze(1)
        scales = layer.get_parameter(_SCALE).float()
        return scales / by_output if self.divides else scales * by_output

    def dequantized(
        self, layer: nn.Module, members: Members, *, exact: bool = False
    ) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each number times both its scales.

        Args:
            exact: scales of both levels are multiplied without being rounded to float32.
        """
        scales = self.scales(layer, members).double()
        if exact:
            by_output = members.per_output(layer.get_parameter(self.tensor_scale)).double()
            scales = layer.get_parameter(_SCALE).double() * by_output.unsqueeze(1)
        return _scaled(layer.get_parameter(self.packed), scales)


COMPRESSED = Nvfp4Storage()
MODELOPT = Nvfp4Storage(
    "weight",
    "weight_scale_2",
    "input_scale",
    divides=False,
    problem="layers of one input run as one product, which has one {name}: {listed}",
    mend="export the model with a release of ModelOpt that makes them equal",
)


class Nvfp4Linear(LinearMethod):
    """Weights in NVFP4, inputs brought to it on the way.

    Codes are ``[O, I / 2]``, ``weight_scale`` is ``[O, I / 16]`` float8_e4m3fn; the scales of a
    layer and of its input are ``[P]``, one number for layers that run as one product.

    Where only the reference multiplies codes by codes, weights are held in 8 bits, and multiplied
    by what the codes of inputs stand for. That is the same product: both represent all of them.
    """

    parts_agree = True

    def __init__(self, storage: Nvfp4Storage = COMPRESSED) -> None:
        self.storage = storage

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the codes, all scales and, if asked for, ``bias``.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.members = Members(layer, site, out_features)
        self.dtype = site.dtype
        self.storage.register(layer, site, self.members, in_features)
        register_per_part(layer, self.storage.input_scale, len(self.members.sizes))
        register(layer, bias=torch.empty(out_features, dtype=site.dtype) if bias else None)
        # Its scale is a constant of the model, which a kernel may prepare.
        self.quantizer = site.bind_kernel(quantize_nvfp4, hidden_size=in_features)
        sizes = {"in_features": in_features, "out_features": out_features}
        self.bound = site.bind_kernel(nvfp4_linear, **sizes, biased=bias)
        self.integers: BoundKernel[Any, Any] | None = None
        choice = self.bound.choice
        is_slow = isinstance(choice.chosen.record, OpEntry) and not choice.wished
        if is_slow and site.resolver.config.dequantize:
            annotate_place(site, _NOT_CALLED, op=nvfp4_linear.name, idle=True)
            width = in_features, out_features, NVFP4_GROUP
            self.integers = bind_weight_only(site, 8, *width, biased=bias)
            self.numbers = site.bind_kernel(dequantize_nvfp4, hidden_size=in_features)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each number times both its scales."""
        return self.storage.dequantized(layer, self.members, exact=not self.storage.divides)

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]``: each rounded number times both its scales."""
        stored = layer.get_parameter(self.storage.input_scale)[:1]
        packed, scales = quantize_nvfp4(x, stored if self.storage.divides else 1 / stored)
        wide, by = scales.double(), stored.double()
        return _scaled(packed, wide / by if self.storage.divides else wide * by)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the quantizer and the bound kernel as one function, with its constants.

        Raises: CheckpointError: a scale is not a positive number, or layers that are fused
            disagree on a global one.
        """
        storage = self.storage
        storage.check(layer, self.members)
        self.members.check(layer.get_parameter(storage.input_scale), storage.input_scale)
        scale, weights = (
            common_number(
                self.members, layer.get_parameter(name), name, storage.mend, storage.problem
            )
            for name in (storage.input_scale, storage.tensor_scale)
        )
        alpha = 1 / (scale * weights) if storage.divides else weights * scale
        scale = scale if storage.divides else scale.reciprocal()
        prepared = self.quantizer.prepared(global_scale=scale)["global_scale"]
        if self.integers is not None:
            one = self.numbers.prepared(global_scale=torch.ones_like(scale))["global_scale"]
            constants = {
                "weight": _doubled(layer.get_parameter(storage.packed)),
                "scale": layer.get_parameter(_SCALE).float() * (alpha / 2),
                "bias": layer._parameters["bias"],
                "zero_points": None,
            }
            held = final_operands(layer, self.integers, constants)
            return self._project_numbers, (*held, prepared, one)
        constants = {
            "weight": layer.get_parameter(storage.packed),
            "weight_scales": layer.get_parameter(_SCALE),
            "alpha": alpha,
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

    def _project_numbers(self, x: torch.Tensor, *operands: Any) -> torch.Tensor:
        """Return the product by weights in 8 bits; both global scales are among theirs."""
        *held, global_scale, one = operands
        codes = self.quantizer.function(x, global_scale)
        # Six bits at most, so that no dtype rounds them.
        numbers = self.numbers.function(*codes, one, x.dtype)
        return self.integers.function(numbers, *held)  # type: ignore[union-attr, no-any-return]


class Nvfp4WeightLinear(WeightLinear):
    """Weights in NVFP4, multiplied in the model's dtype.

    Twice an e2m1 number is an integer, so that the op of int8 weights represents all of them
    exactly, in groups of 16.
    """

    def __init__(self, inputs: Inputs | None, storage: Nvfp4Storage = COMPRESSED) -> None:
        super().__init__(inputs)
        self.storage = storage

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register the codes and all scales, and return a kernel for integers.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.storage.register(layer, site, self.members, in_features)
        sizes = in_features, out_features, NVFP4_GROUP
        return bind_weight_only(site, 8, *sizes, biased=bias)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each number times both its scales."""
        return self.storage.dequantized(layer, self.members)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return twice the numbers as int8, and half of what both scales make.

        Raises: CheckpointError: a scale is not a positive number.
        """
        self.storage.check(layer, self.members)
        doubled = _doubled(layer.get_parameter(self.storage.packed))
        scale = self.storage.scales(layer, self.members) / 2
        return {"weight": doubled, "scale": scale, "zero_points": None}


def _doubled(packed: torch.Tensor) -> torch.Tensor:
    """Return ``[O, I]`` int8: twice the e2m1 numbers."""
    return (2 * decode_e2m1(unpack_nibbles(packed), torch.float32)).to(torch.int8)


def _scaled(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``[..., I]`` float64: e2m1 numbers times the scales of their groups."""
    numbers = decode_e2m1(unpack_nibbles(packed), torch.float64)
    blocks = numbers.unflatten(-1, (scales.shape[-1], NVFP4_GROUP))
    scaled: torch.Tensor = (blocks * scales.unsqueeze(-1)).flatten(-2)
    return scaled
