"""Linear layers of integer weights, as torchao stores them in safetensors.

Dimensions: I input features, O output features, G groups.

Source: ``flatten_tensor_state_dict`` of torchao 0.18 for the names of tensors, ``Int8Tensor`` and
``IntxUnpackedToInt8Tensor`` for their decoding. The scale of a symmetric input is max|x| / 127.5 in
``Int8Tensor`` and max|x| / 127 here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import Site
from interposer.errors import CheckpointError
from interposer_quantization._compressed_tensors.int8_linear import Int8Linear
from interposer_quantization._compressed_tensors.int_linear import PlainIntLinear
from interposer_quantization._compressed_tensors.stored import Inputs, Weights
from interposer_quantization._fp8.parameters import Members
from interposer_quantization._torchao import config
from interposer_quantization._weights.packed_linear import register_stored

WEIGHT, SCALE = "_weight_qdata", "_weight_scale"
_ZERO = "_weight_zero_point"


class TorchAoLinear(PlainIntLinear):
    """Linear method for ``_weight_qdata`` ``[O, I]`` int8 with scales and zero points ``[O, G]``.

    Quantized inputs are fake-quantized and multiplied in the model's dtype: no op takes these
    weights together with quantized inputs.
    """

    weight_name, scale_name, zero_name = WEIGHT, SCALE, _ZERO

    def __init__(self, stored: config.Weights) -> None:
        super().__init__(_weights(stored), _inputs(stored))

    def register_quantized_weight(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register weight and zero points; torchao stores zero points even if all of them are 0."""
        super().register_quantized_weight(layer, site, in_features, out_features)
        if self.weights.symmetric:
            _register_zeros(layer, out_features, self.num_groups)

    def check_scales(self, layer: nn.Module) -> torch.Tensor:
        """Return the scales ``[O, G]``; raise CheckpointError for invalid scales.

        Raises: CheckpointError: a scale is not a positive number.
        """
        scales = layer.get_parameter(SCALE)
        self.members.check(scales, SCALE)
        return scales

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the stored tensors as the op's constants.

        Raises: CheckpointError: a scale is not a positive number, or the weight is symmetric and a
            zero point is not 0.
        """
        constants = super().constants(layer)
        if self.weights.symmetric:
            _check_zeros(layer, self.members)
        return constants


class TorchAoInt8Linear(Int8Linear):
    """Linear method for ``_weight_qdata`` ``[O, I]`` int8 and ``_weight_scale`` ``[O, 1]``.

    Zero points of the weight must be 0. Inputs are quantized to int8 with one scale per token and,
    if asymmetric, a zero point.
    """

    weight_name, scale_name = WEIGHT, SCALE

    def __init__(self, stored: config.Weights) -> None:
        inputs = _inputs(stored)
        assert inputs is not None, "weights with plain inputs are not multiplied by int8"
        super().__init__(_weights(stored), inputs)

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register quantized weight, scales, ``_weight_zero_point`` and, if requested, ``bias``."""
        super().create_weights(layer, site, in_features, out_features, bias)
        _register_zeros(layer, out_features, 1)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Combine the input quantizer and the bound kernel; return function and constants.

        Raises: CheckpointError: a scale is not a positive number, or a zero point not 0.
        """
        _check_zeros(layer, self.members)
        return super().finalize(layer)


def _weights(stored: config.Weights) -> Weights:
    size = stored.inputs_per_scale
    # The storage of compressed-tensors with the same meaning.
    strategy, block = ("channel", None) if size is None else ("group", (1, size))
    return Weights("int", 8, stored.symmetric, strategy, block, reordered=False)


def _inputs(stored: config.Weights) -> Inputs | None:
    if stored.inputs == "plain":
        return None
    symmetric = stored.inputs == "symmetric"
    return Inputs("int", 8, symmetric, "token", None, static=False, exponents=False)


def _register_zeros(layer: nn.Module, rows: int, columns: int) -> None:
    """Register the zero points ``[rows, columns]`` int8 that a symmetric weight stores."""

    def zeros(_: torch.Generator) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.int8)

    register_stored(layer, _ZERO, torch.empty(rows, columns, dtype=torch.int8), sample=zeros)


def _check_zeros(layer: nn.Module, members: Members) -> None:
    zeros = layer.get_parameter(_ZERO)
    rows = list(members.sizes.values())
    for member, member_zeros in zip(members.sizes, zeros.split(rows), strict=True):
        if member_zeros.any():
            raise CheckpointError(
                members.tensor(member, _ZERO),
                f"{int(member_zeros.count_nonzero())} of {member_zeros.numel()} zero points are "
                "not 0, but quantization_config says that weights are symmetric",
                "correct the quantization_config if the zero points are right",
            )
