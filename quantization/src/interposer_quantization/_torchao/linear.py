"""Linear layers of integers as torchao stores them in safetensors.

Dimensions: I input features, O output features, G groups.

Source: ``flatten_tensor_state_dict`` of torchao 0.18 for the names of tensors, ``Int8Tensor`` and
``IntxUnpackedToInt8Tensor`` for what they mean. The first one takes 127.5 for the largest symmetric
code of an input where the op here takes 127.
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
    """``_weight_qdata`` ``[O, I]`` int8, ``_weight_scale`` and ``_weight_zero_point`` ``[O, G]``.

    Where inputs are quantized, they are rounded to what their codes stand for, and multiplied in
    the model's dtype: no op takes both.
    """

    weight_name, scale_name, zero_name = WEIGHT, SCALE, _ZERO

    def __init__(self, stored: config.Weights) -> None:
        super().__init__(_weights(stored), _inputs(stored))

    def register_codes(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register codes and zero points, which are stored even where all of them are 0."""
        super().register_codes(layer, site, in_features, out_features)
        if self.weights.symmetric:
            _register_zeros(layer, out_features, self.num_groups)

    def check_scales(self, layer: nn.Module) -> torch.Tensor:
        """Return the scales ``[O, G]``, after a look at them.

        Raises: CheckpointError: one is not a positive number.
        """
        scales = layer.get_parameter(SCALE)
        self.members.check(scales, SCALE)
        return scales

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the stored tensors.

        Raises: CheckpointError: a scale is not a positive number, or a zero point not 0 though
            weights are symmetric.
        """
        constants = super().constants(layer)
        if self.weights.symmetric:
            _check_zeros(layer, self.members)
        return constants


class TorchAoInt8Linear(Int8Linear):
    """``_weight_qdata`` ``[O, I]`` int8, ``_weight_scale`` ``[O, 1]``, zero points that are 0.

    Inputs get a scale per token and, if they are asymmetric, a zero point.
    """

    weight_name, scale_name = WEIGHT, SCALE

    def __init__(self, stored: config.Weights) -> None:
        inputs = _inputs(stored)
        assert inputs is not None, "weights with plain inputs are not multiplied by int8"
        super().__init__(_weights(stored), inputs)

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``_weight_zero_point`` besides codes, scales and ``bias``."""
        super().create_weights(layer, site, in_features, out_features, bias)
        _register_zeros(layer, out_features, 1)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the quantizer and the bound kernel as one function, with its constants.

        Raises: CheckpointError: a scale is not a positive number, or a zero point not 0.
        """
        _check_zeros(layer, self.members)
        return super().finalize(layer)


def _weights(stored: config.Weights) -> Weights:
    size = stored.inputs_per_scale
    strategy, block = ("channel", None) if size is None else ("group", (1, size))
    return Weights("int", 8, stored.symmetric, strategy, block, reordered=False)


def _inputs(stored: config.Weights) -> Inputs | None:
    if stored.inputs == "plain":
        return None
    symmetric = stored.inputs == "symmetric"
    return Inputs("int", 8, symmetric, "token", None, static=False, exponents=False)


def _register_zeros(layer: nn.Module, rows: int, columns: int) -> None:
    """Register the zero points ``[rows, columns]`` int8, of which every one has to be 0."""

    def zeros(_: torch.Generator) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.int8)

    register_stored(layer, _ZERO, torch.empty(rows, columns, dtype=torch.int8), sample=zeros)


def _check_zeros(layer: nn.Module, members: Members) -> None:
    zeros = layer.get_parameter(_ZERO)
    rows = list(members.sizes.values())
    for member, stored in zip(members.sizes, zeros.split(rows), strict=True):
        if stored.any():
            raise CheckpointError(
                members.tensor(member, _ZERO),
                f"{int(stored.count_nonzero())} of {stored.numel()} zero points are not 0, "
                "but quantization_config says that weights are symmetric",
                "correct the quantization_config if the zero points are right",
            )
