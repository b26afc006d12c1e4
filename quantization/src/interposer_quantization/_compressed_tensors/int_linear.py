"""Linear layers of integer weights that are multiplied in the model's dtype.

Dimensions: I input features, O output features, G groups, P layers of the checkpoint that are
fused.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from interposer import BoundKernel, Site
from interposer.errors import CheckpointError
from interposer_quantization._compressed_tensors.parameters import (
    number_of_groups,
    register_scales,
    scales_by_output,
)
from interposer_quantization._compressed_tensors.stored import Inputs, Weights
from interposer_quantization._compressed_tensors.weight_linear import WeightLinear
from interposer_quantization._fp8.parameters import Members
from interposer_quantization._weights.int_packing import kernel_codes
from interposer_quantization._weights.packed_linear import register_stored
from interposer_quantization._weights.weight_only import bind_weight_only

_NARROW = 4  # bits; half of a byte


class IntLinear(WeightLinear):
    """Weights (code - zero point) * scale, of which codes and zero points are integers.

    Scales are held in float32, which represents those of every checkpoint exactly, whatever the
    model's dtype. They are ``weight_scale``: ``[O, G]``, or ``[P]`` where one serves a layer.

    Attributes:
        scale_name: of the parameter that holds the scales.
        narrow: two codes are held in a byte, which they fill, and not one.
    """

    scale_name = "weight_scale"

    def __init__(self, weights: Weights, inputs: Inputs | None) -> None:
        super().__init__(inputs)
        self.weights = weights

    @abstractmethod
    def register_codes(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register what holds codes and zero points.

        Raises: ConfigError: words do not divide the layer.
        """

    @abstractmethod
    def codes(self, layer: nn.Module) -> torch.Tensor:
        """Return the codes ``[O, I]`` int8, signed."""

    @abstractmethod
    def zero_points(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the zero points ``[O, G]`` int8, signed, or None where all are 0."""

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the group of each input ``[I]`` int64, None where groups follow each other.

        Raises: CheckpointError: the tensor that says so makes no sense.
        """
        return None

    def register_weight(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register codes, zero points and scales.

        Raises: ConfigError: groups or words do not divide the layer.
        """
        self.members = Members(layer, site, out_features)
        self.in_features = in_features
        self.narrow = self.weights.bits <= _NARROW and in_features % 2 == 0
        size = self.weights.inputs_per_scale or in_features
        self.num_groups = number_of_groups(site, in_features, size)
        self.register_codes(layer, site, in_features, out_features)
        columns = None if self.weights.strategy == "tensor" else self.num_groups
        register_scales(layer, self.scale_name, self.members, columns)

    def create_stored(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> BoundKernel[Any, Any]:
        """Register codes, zero points and scales, and return a kernel for integers.

        Raises: ConfigError: groups or words do not divide the layer.
        """
        self.register_weight(layer, site, in_features, out_features)
        return bind_weight_only(
            site,
            4 if self.narrow else 8,
            in_features,
            out_features,
            in_features // self.num_groups,
            not self.weights.symmetric,
            biased=bias,
        )

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each code less its zero point, times its scale."""
        codes, zeros = self.codes(layer).double(), self.zero_points(layer)
        scales = scales_by_output(layer.get_parameter(self.scale_name), self.members).double()
        groups = self.groups(layer)
        if groups is None:
            groups = torch.arange(self.in_features, device=codes.device)
            groups = groups // (self.in_features // self.num_groups)
        if zeros is not None:
            codes = codes - scales_by_output(zeros, self.members).double()[:, groups]
        return codes * scales[:, groups]

    def order(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the inputs sorted by group, None where they are."""
        groups = self.groups(layer)
        return None if groups is None else groups.argsort(stable=True)

    def check_scales(self, layer: nn.Module) -> torch.Tensor:
        """Return the scales ``[O, G]`` or ``[O, 1]``, after a look at them.

        Negative ones are right: they mirror the range of the codes.

        Raises: CheckpointError: one is zero or not finite.
        """
        scales = layer.get_parameter(self.scale_name)
        # Of the rest, magnitudes are what is looked at.
        self.members.check(scales.abs(), self.scale_name)
        return scales_by_output(scales, self.members)


class PlainIntLinear(IntLinear):
    """``weight`` ``[O, I]`` int8, and ``weight_zero_point`` int8 in the shape of the scales.

    Codes of up to four bits are packed when the layer is finalized.
    """

    weight_name, zero_name = "weight", "weight_zero_point"

    def register_codes(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register ``weight`` and, if weights are asymmetric, ``weight_zero_point``."""
        self._register_int8(layer, self.weight_name, (out_features, in_features))
        if self.weights.symmetric:
            return
        num_parts = len(self.members.sizes)
        whole = self.weights.strategy == "tensor"
        shape = (num_parts,) if whole else (out_features, self.num_groups)
        self._register_int8(layer, self.zero_name, shape, per_part=whole)

    def codes(self, layer: nn.Module) -> torch.Tensor:
        """Return the codes as they are stored."""
        return layer.get_parameter(self.weight_name)

    def zero_points(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the zero points as they are stored."""
        return None if self.weights.symmetric else layer.get_parameter(self.zero_name)

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the stored tensors, packed where codes are ``narrow``.

        Raises: CheckpointError: a scale is zero or not finite, or a code has more bits than all.
        """
        scales, zeros = self.check_scales(layer), self.zero_points(layer)
        weight: torch.Tensor = layer.get_parameter(self.weight_name)
        zeros = None if zeros is None else scales_by_output(zeros, self.members)
        if self.narrow:
            self._check_codes(self.weight_name, weight)
            weight = kernel_codes(_unsigned(weight), _NARROW)
            if zeros is not None:
                self._check_codes(self.zero_name, zeros)
                zeros = _unsigned(zeros)
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
        """Return the least and the largest signed code."""
        middle = 1 << self.weights.bits - 1
        return -middle, middle - 1

    def _check_codes(self, name: str, codes: torch.Tensor) -> None:
        low, high = self._range
        rows = list(self.members.sizes.values())
        for member, part in zip(self.members.sizes, codes.split(rows), strict=True):
            least, most = (int(number) for number in part.aminmax())
            if least < low or most > high:
                raise CheckpointError(
                    self.members.tensor(member, name),
                    f"holds codes from {least} to {most}, those of {self.weights.bits} bits are "
                    f"from {low} to {high}",
                    "correct num_bits in quantization_config, or copy the checkpoint again",
                )


def _unsigned(codes: torch.Tensor) -> torch.Tensor:
    """Return signed codes of four bits as unsigned ones, uint8."""
    return (codes + (1 << _NARROW - 1)).view(torch.uint8)
