"""A linear layer whose plain weight becomes integers when it is finalized.

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
from interposer_quantization._weights.paired_int_linear import PairedIntLinear
from interposer_quantization.writing._integer_formats import IntegerFormat
from interposer_quantization.writing._schemes import quantization_config

FormatOf = Callable[[Site, int], IntegerFormat]
"""The format of the layer at a site, by its number of inputs."""


class OnlineIntegerLinear(OnlineLinear):
    """A layer with the product of a layer of compressed-tensors.

    Attributes:
        scale_dtype: that scales are rounded to before numbers are divided by them.
    """

    def __init__(self, format_of: FormatOf, scale_dtype: torch.dtype = torch.float32) -> None:
        self.format_of = format_of
        self.scale_dtype = scale_dtype

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight`` and, if asked for, ``bias``, as plain checkpoints have them.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.chosen = self.format_of(site, in_features)
        scheme = CompressedTensors.parse(quantization_config(self.chosen, ()))
        parts = Members(layer, site, out_features).sizes
        method = scheme.linear_method(site.prefix, tuple(parts))
        assert method is not None, "the class of all linear layers is its target"
        # Codes of four bits that do not fill bytes are held one a byte, which no op rounds to.
        self.rounding: IntegerRounding | None = None
        paired = self.chosen.bits == 4 and in_features % 2 == 0
        self.method = _paired(method) if paired else method
        super().create_weights(layer, site, in_features, out_features, bias)
        if paired or self.chosen.bits == 8:
            sizes = out_features, in_features
            self.rounding = IntegerRounding(self.chosen, site, sizes, self.scale_dtype)

    def _tensors(self, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return codes, ``weight_scale`` and, if asymmetric, ``weight_zero_point``.

        Rows are rounded one by one, so that layers may be fused before.
        """
        if self.rounding is None:
            self._check(weight)
            return self._signed(weight)
        rounded = self.rounding(weight)
        if not rounded.finite:
            self._check(weight)
        names = "weight", "weight_scale", "weight_zero_point"
        tensors = rounded.codes, rounded.scale, rounded.zero_points
        pairs = zip(names, tensors, strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def _signed(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what a checkpoint would hold, but for the dtype of scales."""
        stored: dict[str, torch.Tensor] = {}
        for rows, start in row_chunks(weight):
            wide = rows.float()
            grid = self.chosen.fitted(self.chosen.groups(wide), self.scale_dtype)
            for name, tensor in self.chosen.stored(wide, grid, torch.float32).items():
                if name not in stored:
                    stored[name] = tensor.new_empty((len(weight), *tensor.shape[1:]))
                stored[name][start : start + len(tensor)] = tensor
        return stored


def _paired(method: LinearMethod) -> LinearMethod:
    """Return the method that holds two codes of four bits in a byte."""
    if isinstance(method, W4A8Linear):
        method.stored = PairedIntLinear(method.stored.weights, None)
        return method
    assert isinstance(method, IntLinear)
    return PairedIntLinear(method.weights, method.inputs)


def largest_group(site: Site, in_features: int, sizes: Sequence[int]) -> int:
    """Return the first of ``sizes`` of groups that divides the inputs.

    Raises: ConfigError: there is none.
    """
    for size in sizes:
        if in_features % size == 0:
            return size
    listed = ", ".join(map(str, sizes))
    raise ConfigError(
        f"{site.prefix}: no groups of {listed} divide its {in_features} inputs. Try: state a "
        "'group_size' that does, or name the layer in 'modules_to_not_convert'"
    )
