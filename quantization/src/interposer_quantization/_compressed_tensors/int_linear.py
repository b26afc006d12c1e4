"""Linear layers of integer weights with inputs in the model's dtype.

Dimensions: I input features, O output features, G groups, P fused layers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer.errors import CheckpointError
from interposer_quantization._compressed_tensors.parameters import (
    count_groups,
    register_scales,
    scales_by_output,
)
from interposer_quantization._compressed_tensors.stored import Inputs, Weights
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import Members
from interposer_quantization._weights.int_packing import to_kernel_layout
from interposer_quantization._weights.packed_linear import register_stored
from interposer_quantization._weights.weight_only import bind_weight_only

_NIBBLE_BITS = 4


class IntLinear(WeightLinear):
    """Base of linear methods for weights (quantized value - zero point) * scale.

    Scales are kept in float32, which represents the scales of every checkpoint exactly. The
    parameter ``weight_scale`` is ``[O, G]``, or ``[P]`` for one scale per fused layer.

    Attributes:
        scale_name: name of the parameter that holds the scales.
        packs_nibbles: the kernel's weight holds two values per byte instead of one.
    """

    scale_name = "weight_scale"

    def __init__(self, weights: Weights, inputs: Inputs | None) -> None:
        super().__init__(inputs)
        self.weights = weights

    @abstractmethod
    def register_quantized_weight(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register the quantized weight and the zero points.

        Raises: ConfigError: the packing does not divide the layer's sizes.
        """

    @abstractmethod
    def quantized_weight(self, layer: nn.Module) -> torch.Tensor:
        """Return the quantized weight ``[O, I]`` int8."""

    @abstractmethod
    def zero_points(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the zero points ``[O, G]`` int8, or None if the weight is symmetric."""

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the group of each input ``[I]`` int64, or None if groups are consecutive.

        Raises: CheckpointError: the stored group indices are invalid.
        """
        return None

    def register_weight(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register quantized weight, zero points and scales.

        Raises: ConfigError: the group size or the packing does not divide the layer's sizes.
        """
        self.members = Members(layer, site, out_features)
        self.in_features = in_features
        self.packs_nibbles = self.weights.bits <= _NIBBLE_BITS and in_features % 2 == 0
        size = self.weights.inputs_per_scale or in_features
        self.num_groups = count_groups(site, in_features, size)
        self.register_quantized_weight(layer, site, in_features, out_features)
        # None registers one scale per fused layer.
        columns = None if self.weights.strategy == "tensor" else self.num_groups
        register_scales(layer, self.scale_name, self.members, columns)

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register quantized weight, zero points and scales; bind the kernel.

        Raises: ConfigError: the group size or the packing does not divide the layer's sizes.
        """
        self.register_weight(layer, site, in_features, out_features)
        return bind_weight_only(
            site,
            4 if self.packs_nibbles else 8,
            in_features,
            out_features,
            in_features // self.num_groups,
            not self.weights.symmetric,
            biased=bias,
        )

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: (quantized value - zero point) * scale."""
        quantized, zeros = self.quantized_weight(layer).double(), self.zero_points(layer)
        scales = scales_by_output(layer.get_parameter(self.scale_name), self.members).double()
        groups = self.groups(layer)
        if groups is None:
            # Consecutive groups.
            groups = torch.arange(self.in_features, device=quantized.device)
            groups = groups // (self.in_features // self.num_groups)
        if zeros is not None:
            quantized = quantized - scales_by_output(zeros, self.members).double()[:, groups]
        return quantized * scales[:, groups]

    def order(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the permutation that sorts the inputs by group, or None for sorted inputs."""
        groups = self.groups(layer)
        return None if groups is None else groups.argsort(stable=True)

    def check_scales(self, layer: nn.Module) -> torch.Tensor:
        """Return the scales as ``[O, G]`` or ``[O, 1]``; raise CheckpointError for invalid scales.

        Negative scales are valid: they mirror the range of the quantized values.

        Raises: CheckpointError: a scale is zero or not finite.
        """
        scales = layer.get_parameter(self.scale_name)
        # abs(): members.check refuses negative numbers, which are valid here.
        self.members.check(scales.abs(), self.scale_name)
        return scales_by_output(scales, self.members)


class PlainIntLinear(IntLinear):
    """Linear method for unpacked weights: ``weight`` ``[O, I]`` int8, ``weight_zero_point`` int8.

    Zero points have the shape of the scales. ``finalize`` packs values of up to four bits into
    nibbles.
    """

    weight_name, zero_name = "weight", "weight_zero_point"

    def register_quantized_weight(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register ``weight`` and, if asymmetric, ``weight_zero_point``."""
        self._register_int8(layer, self.weight_name, (out_features, in_features))
        if self.weights.symmetric:
            return
        num_parts = len(self.members.sizes)
        is_per_tensor = self.weights.strategy == "tensor"
        shape = (num_parts,) if is_per_tensor else (out_features, self.num_groups)
        self._register_int8(layer, self.zero_name, shape, per_part=is_per_tensor)

    def quantized_weight(self, layer: nn.Module) -> torch.Tensor:
        """Return the stored quantized weight."""
        return layer.get_parameter(self.weight_name)

    def zero_points(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the stored zero points, or None if the weight is symmetric."""
        return None if self.weights.symmetric else layer.get_parameter(self.zero_name)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the op's constants; values of up to four bits are packed two per byte.

        Raises: CheckpointError: a scale is zero or not finite, or a value exceeds ``num_bits``.
        """
        scales, zeros = self.check_scales(layer), self.zero_points(layer)
        weight: torch.Tensor = layer.get_parameter(self.weight_name)
        zeros = None if zeros is None else scales_by_output(zeros, self.members)
        if self.packs_nibbles:
            self._check_codes(self.weight_name, weight)
            weight = to_kernel_layout(_to_unsigned(weight), _NIBBLE_BITS)
            if zeros is not None:
                self._check_codes(self.zero_name, zeros)
                zeros = _to_unsigned(zeros)
        return {"weight": weight, "scale": scales, "zero_points": zeros}

    def _register_int8(
        self, layer: nn.Module, name: str, shape: tuple[int, ...], **attributes: object
    ) -> None:
        low, high = self._range

        def sample(generator: torch.Generator) -> torch.Tensor:
            return torch.randint(low, high + 1, shape, dtype=torch.int8, generator=generator)

        empty = torch.empty(shape, dtype=torch.int8)
        register_stored(layer, name, empty, sample=sample, **attributes)

    @property
    def _range(self) -> tuple[int, int]:
        """Return the smallest and the largest value of signed integers of ``bits`` bits."""
        middle = 1 << self.weights.bits - 1
        return -middle, middle - 1

    def _check_codes(self, name: str, values: torch.Tensor) -> None:
        low, high = self._range
        rows = list(self.members.sizes.values())
        for member, part in zip(self.members.sizes, values.split(rows), strict=True):
            smallest, largest = (int(number) for number in part.aminmax())
            if smallest < low or largest > high:
                raise CheckpointError(
                    self.members.tensor(member, name),
                    f"holds values from {smallest} to {largest}, but {self.weights.bits}-bit "
                    f"values are from {low} to {high}",
                    "correct num_bits in quantization_config, or copy the checkpoint again",
                )


def _to_unsigned(signed: torch.Tensor) -> torch.Tensor:
    """Shift signed 4-bit values to the range 0 to 15, uint8."""
    return (signed + (1 << _NIBBLE_BITS - 1)).view(torch.uint8)
