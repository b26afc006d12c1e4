"""Linear layer whose float weight ``finalize`` quantizes to integers.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import ConfigError
from interposer_ops.quantizers import row_chunks
from interposer_quantization._compressed_tensors.int_linear import IntLinear
from interposer_quantization._compressed_tensors.scheme import CompressedTensors
from interposer_quantization._compressed_tensors.w4a8_linear import W4A8Linear
from interposer_quantization._fp8.parameters import Members
from interposer_quantization._online.linear import OnlineLinear
from interposer_quantization._weights.integer_rounding import IntegerRounding
from interposer_quantization._weights.nibble_int_linear import NibbleIntLinear
from interposer_quantization.writing._integer_formats import IntegerFormat
from interposer_quantization.writing._schemes import quantization_config

FormatOf = Callable[[Site, int], IntegerFormat]
"""Function from a layer's site and number of inputs to its format."""


class OnlineIntegerLinear(OnlineLinear):
    """Linear method with online integer quantization, executed as a compressed-tensors layer.

    Attributes:
        scale_dtype: dtype to which scales are rounded before the division.
    """

    def __init__(self, format_of: FormatOf, scale_dtype: torch.dtype = torch.float32) -> None:
        self.format_of = format_of
        self.scale_dtype = scale_dtype

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register float ``weight`` and, if requested, ``bias``, as unquantized checkpoints do.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.chosen = self.format_of(site, in_features)
        # Execute the layer as the checkpoint that ``interposer quantize`` would write.
        scheme = CompressedTensors.parse(quantization_config(self.chosen, ()))
        parts = Members(layer, site, out_features).sizes
        method = scheme.linear_method(site.prefix, tuple(parts))
        assert method is not None, "the class of all linear layers is its target"
        # An odd number of 4-bit inputs is stored one value per byte, which no quantizer op writes.
        self.rounding: IntegerRounding | None = None
        packs_nibbles = self.chosen.bits == 4 and in_features % 2 == 0
        self.method = _with_nibbles(method) if packs_nibbles else method
        super().create_weights(layer, site, in_features, out_features, bias)
        if packs_nibbles or self.chosen.bits == 8:
            sizes = out_features, in_features
            self.rounding = IntegerRounding(self.chosen, site, sizes, self.scale_dtype)

    def _quantized_tensors(self, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Quantize the weight to ``weight``, ``weight_scale`` and, if asymmetric, zero points.

        Rows are quantized independently, so fused layers need no separate pass.
        """
        if self.rounding is None:
            self._check(weight)
            return self._round_to_int8(weight)
        rounded = self.rounding(weight)
        if not rounded.is_finite:
            self._check(weight)
        names = "weight", "weight_scale", "weight_zero_point"
        tensors = rounded.quantized, rounded.scale, rounded.zero_points
        tensors_by_name = zip(names, tensors, strict=True)
        return {name: tensor for name, tensor in tensors_by_name if tensor is not None}

    def _round_to_int8(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantize a weight to the tensors of a compressed-tensors layer, with float32 scales."""
        stored: dict[str, torch.Tensor] = {}
        for rows, start in row_chunks(weight):
            rows_f32 = rows.float()
            grid = self.chosen.fitted(self.chosen.groups(rows_f32), self.scale_dtype)
            for name, tensor in self.chosen.stored(rows_f32, grid, torch.float32).items():
                if name not in stored:
                    stored[name] = tensor.new_empty((len(weight), *tensor.shape[1:]))
                stored[name][start : start + len(tensor)] = tensor
        return stored


def _with_nibbles(method: LinearMethod) -> LinearMethod:
    """Return the method for the same weight, stored with two 4-bit values per byte."""
    if isinstance(method, W4A8Linear):
        method.stored = NibbleIntLinear(method.stored.weights, None)
        return method
    assert isinstance(method, IntLinear)
    return NibbleIntLinear(method.weights, method.inputs)


def largest_group(site: Site, in_features: int, sizes: Sequence[int]) -> int:
    """Return the first of ``sizes`` that divides the number of inputs.

    Raises: ConfigError: no size divides it.
    """
    for size in sizes:
        if in_features % size == 0:
            return size
    listed = ", ".join(map(str, sizes))
    raise ConfigError(
        f"{site.prefix}: no groups of {listed} divide its {in_features} inputs. Try: state a "
        "'group_size' that does, or name the layer in 'modules_to_not_convert'"
    )
